/**
 * A client of ctxcache in plain JavaScript: unary calls, appends, reads, and errors with their reasons.
 *
 * Built from the .proto files at run time, so there is no generated code. 64-bit integers are decimal
 * strings on both ways: a checksum does not fit into a Number.
 */

import { Readable } from 'node:stream';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';
import { createXXHash3 } from 'hash-wasm';

const CALL_TIMEOUT_MS = 30_000;
const DETAILS_KEY = 'grpc-status-details-bin';
const PROTO_DIRECTORIES = ['../../../proto', './protos'].map((path) =>
  fileURLToPath(new URL(path, import.meta.url)),
);
const PROTO_FILES = [
  'ctxcache/v1/model.proto',
  'ctxcache/v1/session.proto',
  'ctxcache/v1/block.proto',
  'ctxcache/v1/prefix.proto',
  'ctxcache/v1/admin.proto',
  'google_rpc.proto',
  'grpc_health.proto',
];

const definition = protoLoader.loadSync(PROTO_FILES, {
  includeDirs: PROTO_DIRECTORIES,
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
});
const loaded = grpc.loadPackageDefinition(definition);
const xxh3 = await createXXHash3(0, 0);

/** Opens one connection; close every client of it with `close`. `target` is `host:port` or `unix:/path`. */
export function connect(target, credentials = grpc.credentials.createInsecure()) {
  const { AdminService, BlockService, ModelService, PrefixService, SessionService } = loaded.ctxcache.v1;
  const { Health } = loaded.grpc.health.v1;
  const clients = {
    admin: new AdminService(target, credentials),
    blocks: new BlockService(target, credentials),
    prefixes: new PrefixService(target, credentials),
    models: new ModelService(target, credentials),
    sessions: new SessionService(target, credentials),
    health: new Health(target, credentials),
  };
  return { ...clients, close: () => Object.values(clients).forEach((client) => client.close()) };
}

/** What the server said went wrong. Act on `reason`; `message` is for people and may change. */
export class CtxcacheError extends Error {
  constructor(error) {
    super(error.details ?? error.message, { cause: error });
    this.code = grpc.status[error.code];
    const details = detailsOf(error);
    this.reason = details.ErrorInfo?.domain === 'ctxcache' ? details.ErrorInfo.reason : '';
    this.facts = details.ErrorInfo?.metadata ?? {};
    this.field = details.BadRequest?.fieldViolations[0]?.field ?? '';
    this.retryDelay = details.RetryInfo?.retryDelay;
  }
}

function detailsOf(error) {
  const [encoded] = error.metadata?.get(DETAILS_KEY) ?? [];
  if (!encoded) {
    return {};
  }
  const known = ['ErrorInfo', 'BadRequest', 'RetryInfo'];
  const status = definition['google.rpc.Status'].deserialize(encoded);
  const found = status.details.map((any) => [any.type_url.split('/google.rpc.').at(-1), any.value]);
  return Object.fromEntries(
    found
      .filter(([name]) => known.includes(name))
      .map(([name, value]) => [name, definition[`google.rpc.${name}`].deserialize(value)]),
  );
}

/** Calls a unary rpc: `await call(client.sessions, 'getSession', { name })`. */
export function call(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, { deadline: Date.now() + CALL_TIMEOUT_MS }, (error, response) =>
      error ? reject(new CtxcacheError(error)) : resolve(response),
    );
  });
}

/** XXH3-64 with seed 0 as a decimal string, which is what a fixed64 field takes and returns. */
export function wireChecksum(data) {
  return BigInt(`0x${xxh3.init().update(data).digest('hex')}`).toString();
}

/** A message with rows of one stream; `data` holds whole rows, at most 2 MiB of them. */
export function chunk(stream, tokenBegin, data) {
  return { chunk: { stream, tokenBegin, data, checksum: wireChecksum(data) } };
}

/** Sends a header, then `messages` (chunks and commits, iterable or async iterable) as fast as the server takes them. */
export function append(client, header, messages) {
  return new Promise((resolve, reject) => {
    const stream = client.sessions.appendSession(
      { deadline: Date.now() + CALL_TIMEOUT_MS },
      (error, response) => (error ? reject(new CtxcacheError(error)) : resolve(response.session)),
    );
    Readable.from(headed(header, messages)).pipe(stream);
  });
}

async function* headed(header, messages) {
  yield { header };
  yield* messages;
}

/**
 * Reads rows. Resolves to the header and, by stream (`"layer kind"`), the rows in one Buffer.
 * Throws CtxcacheError, and Error when bytes were damaged on the way.
 */
export async function read(client, request) {
  const stream = client.sessions.readSession(request, { deadline: Date.now() + CALL_TIMEOUT_MS });
  const parts = {};
  let header;
  try {
    for await (const message of stream) {
      if (message.message === 'header') {
        header = message.header;
      } else {
        const key = streamKey(message.chunk.stream);
        (parts[key] ??= []).push(verified(message.chunk));
      }
    }
  } catch (error) {
    throw error instanceof Error && 'code' in error ? new CtxcacheError(error) : error;
  } finally {
    stream.cancel();
  }
  const rows = Object.entries(parts).map(([key, pieces]) => [key, Buffer.concat(pieces)]);
  return { header, rows: Object.fromEntries(rows) };
}

/** One stream as a range, as models, layouts and reads list them. */
export function rangeOf({ layer, kind }) {
  return { kind, layerBegin: layer, layerEnd: layer + 1 };
}

/** How `read` names a stream. */
export function streamKey({ layer, kind }) {
  return `${layer} ${kind}`;
}

function verified({ stream, tokenBegin, data, checksum }) {
  if (wireChecksum(data) !== checksum) {
    throw new Error(`${streamKey(stream)} at token ${tokenBegin}: data does not match its checksum`);
  }
  return data;
}

/**
 * Blocks and prefixes over the wire, as a router or an engine in another language uses them. Needs a server, as
 * conversation.test.js says.
 */

import assert from 'node:assert/strict';
import { createHash, randomBytes, randomUUID } from 'node:crypto';
import { after, before, test } from 'node:test';
import { append, call, chunk, connect, CtxcacheError, rangeOf, wireChecksum } from './ctxcache.js';
import { prefixKeys } from './fingerprint.js';

const client = connect(process.env.CTXCACHE_TARGET ?? '127.0.0.1:7420');
after(() => client.close());

/** A space of its own for each test: whole blocks of one part, or of one part a rank. */
function newSpace(rankCount = 1) {
  const parts = Array.from({ length: rankCount }, (_, rank) => ({ layerBegin: 0, layerEnd: 2, rank }));
  return { modelFingerprint: randomBytes(32), layoutTag: 'pages of 16 tokens', salt: Buffer.alloc(0), parts };
}

function keyOf(number) {
  return createHash('sha256').update(`block ${number}`).digest();
}

function dataOf(number, sizeBytes = 5000) {
  return Buffer.alloc(sizeBytes, `block ${number} `);
}

/** Puts blocks, each a list of its parts' bytes by key; resolves to the answer. `change` spoils a message. */
function put(space, blocks, { parents = {}, durability = 'DURABILITY_MEMORY', change = (one) => one } = {}) {
  const entries = [...blocks];
  return new Promise((resolve, reject) => {
    const stream = client.blocks.putBlocks((error, response) =>
      error ? reject(new CtxcacheError(error)) : resolve(response),
    );
    const asked = entries.map(([key, parts]) => ({
      key,
      parentKey: parents[key.toString('hex')] ?? Buffer.alloc(0),
      partBytes: parts.map((part) => part.length),
    }));
    stream.write({ header: { blocks: { space, blocks: asked }, durability } });
    for (const [block, [, parts]] of entries.entries()) {
      for (const [part, data] of parts.entries()) {
        stream.write({ bytes: change({ block, part, beginBytes: 0, data, checksum: wireChecksum(data) }) });
      }
    }
    stream.end();
  });
}

/** Reads blocks: by key, the bytes of all their parts, verified; null for one that is not there. */
async function load(space, keys) {
  const stream = client.blocks.readBlocks({ blocks: { space, keys } });
  let found;
  for await (const message of stream) {
    if (message.message === 'header') {
      found = message.header.blocks.map(({ partBytes }) => (partBytes.length ? partBytes.map(() => []) : null));
    } else {
      const { block, part, data, checksum } = message.bytes;
      assert.equal(wireChecksum(data), checksum);
      found[block][part].push(data);
    }
  }
  return found.map((parts) => parts && parts.map((pieces) => Buffer.concat(pieces)));
}

async function statesOf(space, ...numbers) {
  const { states } = await call(client.blocks, 'lookupBlocks', { space, keys: numbers.map(keyOf) });
  return states.map((state) => state.replace('LOOKUP_STATE_', ''));
}

async function fails(promise, code, reason, field) {
  const error = await promise.then(
    () => assert.fail(`${reason} expected, the call succeeded`),
    (thrown) => (thrown instanceof CtxcacheError ? thrown : new CtxcacheError(thrown)),
  );
  assert.deepEqual([error.code, error.reason, error.field], [code, reason, field ?? error.field], error.message);
}

// -- blocks -----------------------------------------------------------------------------------------

test('blocks are put, found, read and deleted', async () => {
  const space = newSpace();
  const blocks = new Map([1, 2, 3].map((number) => [keyOf(number), [dataOf(number)]]));

  const { states, putCount } = await put(space, blocks, { durability: 'DURABILITY_DISK' });
  const again = await put(space, blocks);

  assert.deepEqual([states, putCount], [Array(3).fill('LOOKUP_STATE_HIT'), 3]);
  assert.equal(again.putCount, 0);
  assert.deepEqual(await statesOf(space, 1, 9, 3), ['HIT', 'MISS', 'HIT']);
  assert.deepEqual(await statesOf(newSpace(), 1), ['MISS']);
  assert.deepEqual(await load(space, [3, 9, 1].map(keyOf)), [[dataOf(3)], null, [dataOf(1)]]);
  const { deletedCount } = await call(client.blocks, 'deleteBlocks', { space, keys: [1, 9].map(keyOf) });
  assert.equal(deletedCount, 1);
  assert.deepEqual(await statesOf(space, 1, 2), ['MISS', 'HIT']);
});

test('a block of two ranks has both parts', async () => {
  const space = newSpace(2);

  await put(space, [[keyOf(1), [dataOf(1), dataOf(2, 70)]]]);

  assert.deepEqual(await load(space, [keyOf(1)]), [[dataOf(1), dataOf(2, 70)]]);
});

test('a lease is used by its token, until it is released', async () => {
  const space = newSpace();
  await put(space, [[keyOf(1), [dataOf(1)]]]);

  const { token, blocks } = await call(client.blocks, 'leaseBlocks', { space, keys: [keyOf(1)] });
  const again = await call(client.blocks, 'leaseBlocks', { token });
  await call(client.blocks, 'releaseBlocks', { token });

  assert.deepEqual(blocks[0].partBytes, [5000]);
  assert.deepEqual(again.blocks, blocks);
  await fails(call(client.blocks, 'leaseBlocks', { token }), 'NOT_FOUND', 'LEASE_NOT_FOUND');
});

test('bad requests name their field and put nothing', async () => {
  const space = newSpace();
  const whole = [[keyOf(1), [dataOf(1)]]];
  const invalid = (promise, field) => fails(promise, 'INVALID_ARGUMENT', 'INVALID_FIELD', field);

  await invalid(put(space, [[Buffer.alloc(31), [dataOf(1)]]]), 'blocks[0].key');
  await invalid(put(space, whole, { parents: { [keyOf(1).toString('hex')]: keyOf(8) } }), 'blocks[0].parent_key');
  await invalid(put(space, [[keyOf(1), [dataOf(1, (16 << 20) + 1)]]], { change: (one) => ({ ...one, data: Buffer.alloc(1) }) }), 'blocks[0].part_bytes');
  await invalid(put(newSpace(2), whole), 'blocks[0].part_bytes');
  await invalid(put({ ...space, modelFingerprint: Buffer.alloc(3) }, whole), 'space.model_fingerprint');
  await invalid(call(client.blocks, 'lookupBlocks', { space, keys: [] }), 'keys');
  await fails(
    put(space, whole, { change: (one) => ({ ...one, checksum: '1' }) }),
    'INVALID_ARGUMENT',
    'CHECKSUM_MISMATCH',
    'bytes.data',
  );

  assert.deepEqual(await statesOf(space, 1), ['MISS']);
});

test('a subscriber knows what is there', async () => {
  const space = newSpace();
  await put(space, [1, 2].map((number) => [keyOf(number), [dataOf(number)]]));
  const stream = client.blocks.subscribeBlocks({ space });
  const known = new Map();
  const messages = stream[Symbol.asyncIterator]();
  const hear = async (condition) => {
    while (!condition()) {
      const { value } = await messages.next();
      value.keys.forEach((key, i) => {
        known.set(key.toString('hex'), [value.states[i], value.sizeBytes[i], value.parentKeys[i].toString('hex')]);
      });
    }
  };
  const of = (number) => known.get(keyOf(number).toString('hex'));
  const there = ['LOOKUP_STATE_HIT', '5000', ''];

  await hear(() => known.size === 2);
  assert.deepEqual([of(1), of(2)], [there, there]);
  const parents = { [keyOf(3).toString('hex')]: keyOf(2) };
  await put(space, [[keyOf(3), [dataOf(3)]]], { parents });
  await call(client.blocks, 'deleteBlocks', { space, keys: [keyOf(1)] });
  await hear(() => of(3) && of(1)[0] === 'LOOKUP_STATE_MISS');
  assert.deepEqual(of(3), ['LOOKUP_STATE_HIT', '5000', keyOf(2).toString('hex')]);
  stream.on('error', () => {});
  stream.cancel();
});

// -- prefixes ---------------------------------------------------------------------------------------

const KV = { layer: 0, kind: 'STATE_KIND_KV' };
const TOKENS = { layer: -1, kind: 'STATE_KIND_TOKENS' };
const model = {
  name: `models/${randomUUID()}`,
  architecture: 'LlamaForCausalLM',
  dtype: 'DTYPE_FLOAT32',
  layerCount: 1,
  hiddenSize: 8,
  kvHeadCount: 1,
  headSize: 8,
  isRelocatable: true,
  streams: [{ streams: rangeOf(KV), rowBytes: 64, dtype: 'DTYPE_FLOAT32' }],
};
const layout = [rangeOf(KV)];
let fingerprint;

before(async () => {
  ({ fingerprint } = await call(client.models, 'registerModel', { model }));
});

function idsOf(begin, end, base = 0) {
  const ids = Buffer.alloc(4 * (end - begin));
  for (let i = begin; i < end; i++) {
    ids.writeInt32LE(base + i, 4 * (i - begin));
  }
  return ids;
}

async function sessionOf(tokenIds, { salt = Buffer.alloc(0), contents = [] } = {}) {
  const tokenCount = tokenIds.length / 4;
  const { name } = await call(client.sessions, 'createSession', { model: model.name, layout, salt });
  await append(client, { name, modelFingerprint: fingerprint, writeOffset: 0, contents }, [
    chunk(TOKENS, 0, tokenIds),
    chunk(KV, 0, Buffer.alloc(64 * tokenCount, 'row ')),
    { commit: { tokenCount, durability: 'DURABILITY_DISK' } },
  ]);
  return name;
}

test('a prompt is found by its token ids, and by keys that are computed here', async () => {
  const base = Math.floor(Math.random() * 2 ** 30);
  await sessionOf(idsOf(0, 200, base));
  const match = (prefix) => call(client.prefixes, 'matchPrefix', { model: model.name, layout, prefix });
  const prompt = Buffer.concat([idsOf(0, 150, base), idsOf(0, 100, base)]);

  const byIds = await match({ tokenIds: prompt });
  const byKeys = await match({ keys: prefixKeys({ tenant: 'default', fingerprint, layout: [{ kind: 3, begin: 0, end: 1 }], tokenIds: prompt }) });

  assert.deepEqual([byIds.state, byIds.tokenCount, byIds.reason], ['LOOKUP_STATE_HIT', '128', 'NOT_STORED']);
  assert.deepEqual([byKeys.state, byKeys.tokenCount], ['LOOKUP_STATE_HIT', '128']);
  const nothing = await match({ tokenIds: idsOf(1, 150, base) });
  assert.deepEqual([nothing.state, nothing.tokenCount], ['LOOKUP_STATE_MISS', '0']);
});

test('a match holds what it found, by a token', async () => {
  const base = Math.floor(Math.random() * 2 ** 30);
  const tokenIds = idsOf(0, 200, base);
  await sessionOf(tokenIds);
  const match = (leaseTtl) => call(client.prefixes, 'matchPrefix', { model: model.name, layout, prefix: { tokenIds }, leaseTtl });

  const { tokenCount, leaseToken, leaseExpireTime } = await match({ seconds: 60 });

  assert.deepEqual([tokenCount, leaseToken.length, (await match(null)).leaseToken.length], ['192', 16, 0]);
  assert.ok(Number(leaseExpireTime.seconds) > Date.now() / 1000);
  await fails(call(client.blocks, 'leaseBlocks', { token: leaseToken }), 'INVALID_ARGUMENT', 'INVALID_FIELD', 'token');
  await call(client.blocks, 'releaseBlocks', { token: leaseToken });
  await fails(call(client.blocks, 'releaseBlocks', { token: leaseToken }), 'NOT_FOUND', 'LEASE_NOT_FOUND');
  await fails(match({ seconds: 301 }), 'INVALID_ARGUMENT', 'INVALID_FIELD', 'lease_ttl');
});

test('pictures and a salt are in keys that are computed here', async () => {
  const base = Math.floor(Math.random() * 2 ** 30);
  const salt = Buffer.from('user 17');
  const contents = [{ begin: 60, end: 140, digest: randomBytes(32) }, { begin: 150, end: 151, digest: Buffer.alloc(32) }];
  const tokenIds = idsOf(0, 200, base);
  const name = await sessionOf(tokenIds, { salt, contents });
  const match = (request) => call(client.prefixes, 'matchPrefix', { model: model.name, layout, ...request });
  const keysOf = (facts) =>
    prefixKeys({ tenant: 'default', fingerprint, layout: [{ kind: 3, begin: 0, end: 1 }], tokenIds, ...facts });

  const byIds = await match({ salt, prefix: { tokenIds, contents } });
  const byKeys = await match({ prefix: { keys: keysOf({ salt, contents }) } });
  const others = [await match({ prefix: { tokenIds, contents } }), await match({ prefix: { keys: keysOf({ salt }) } })];
  const told = await call(client.sessions, 'getSession', { name });

  assert.deepEqual([byIds.tokenCount, byKeys.tokenCount], ['192', '192']);
  assert.deepEqual(others.map((one) => one.tokenCount), ['0', '0']);
  assert.deepEqual([told.salt, told.contents.map((one) => [Number(one.begin), Number(one.end), one.digest])], [
    salt,
    contents.map((one) => [one.begin, one.end, one.digest]),
  ]);
  await fails(match({ salt, prefix: { keys: [keyOf(1)] } }), 'INVALID_ARGUMENT', 'INVALID_FIELD', 'salt');
  const short = { begin: 0, end: 1, digest: Buffer.alloc(31) };
  await fails(match({ prefix: { tokenIds, contents: [short] } }), 'INVALID_ARGUMENT', 'INVALID_FIELD', 'prefix.contents[0].digest');
});

test('a session adopts what another one has', async () => {
  const base = Math.floor(Math.random() * 2 ** 30);
  await sessionOf(idsOf(0, 200, base));
  const { name } = await call(client.sessions, 'createSession', { model: model.name, layout });
  const adopt = () =>
    call(client.prefixes, 'adoptPrefix', {
      session: name,
      modelFingerprint: fingerprint,
      prefix: { tokenIds: idsOf(0, 300, base) },
    });

  const { session } = await adopt();

  assert.deepEqual([session.tokenCount, session.durableTokenCount], ['192', '192']);
  await fails(adopt(), 'INVALID_ARGUMENT', 'INVALID_FIELD', 'session');
  const { prefixes } = await call(client.prefixes, 'listSharedPrefixes', { pageSize: 1000 });
  assert.ok(prefixes.some((one) => one.tokenCount === '192' && one.sessionCount === '2'));
});

test('a prefix is given by ids or by keys, whole', async () => {
  const match = (prefix) => call(client.prefixes, 'matchPrefix', { model: model.name, layout, prefix });

  await fails(match({}), 'INVALID_ARGUMENT', 'INVALID_FIELD');
  await fails(match({ tokenIds: Buffer.alloc(5) }), 'INVALID_ARGUMENT', 'INVALID_FIELD', 'prefix.token_ids');
  await fails(match({ keys: [Buffer.alloc(8)] }), 'INVALID_ARGUMENT', 'INVALID_FIELD');
  await fails(match({ tokenIds: idsOf(0, 64), keys: [keyOf(1)] }), 'INVALID_ARGUMENT', 'INVALID_FIELD');
});

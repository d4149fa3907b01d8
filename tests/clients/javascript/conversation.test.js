/**
 * One conversation over the wire, as a client in another language lives it. Needs a server:
 *
 *     CTXCACHE_TARGET=127.0.0.1:7420 node --test
 */

import assert from 'node:assert/strict';
import { randomUUID } from 'node:crypto';
import { after, before, test } from 'node:test';
import { setTimeout } from 'node:timers/promises';
import { append, call, chunk, connect, CtxcacheError, rangeOf, read, streamKey } from './ctxcache.js';
import { modelFingerprint } from './fingerprint.js';

const TOKENS = { layer: -1, kind: 'STATE_KIND_TOKENS' };
const HIDDEN = { layer: 0, kind: 'STATE_KIND_HIDDEN' };
const KV = { layer: 1, kind: 'STATE_KIND_KV' };
const ROW_BYTES = { [streamKey(TOKENS)]: 4, [streamKey(HIDDEN)]: 96, [streamKey(KV)]: 64 };
const LAYOUT = [TOKENS, HIDDEN, KV];
const SERVICES = [
  '',
  'ctxcache.v1.SessionService',
  'ctxcache.v1.ModelService',
  'ctxcache.v1.HintService',
  'ctxcache.v1.AdminService',
];

const client = connect(process.env.CTXCACHE_TARGET ?? '127.0.0.1:7420');
const model = {
  name: `models/${randomUUID()}`,
  architecture: 'LlamaForCausalLM',
  revision: 'größe',
  dtype: 'DTYPE_BFLOAT16',
  layerCount: 2,
  hiddenSize: 48,
  kvHeadCount: 2,
  headSize: 8,
  rope: 'theta=10000',
  isRelocatable: true,
  streams: [
    { streams: rangeOf(KV), rowBytes: 64, dtype: 'DTYPE_BFLOAT16' },
    { streams: rangeOf(HIDDEN), rowBytes: 96, dtype: 'DTYPE_BFLOAT16' },
  ],
};
let fingerprint;

before(async () => {
  ({ fingerprint } = await call(client.models, 'registerModel', { model }));
});

after(() => client.close());

// -- what the tests save --------------------------------------------------------------------------

/** Makes rows of one stream that spell which stream and which tokens they are. */
function rowsOf(stream, tokens) {
  const rowBytes = ROW_BYTES[streamKey(stream)];
  const rows = Buffer.alloc(tokens.length * rowBytes);
  tokens.forEach((token, i) => {
    if (stream === TOKENS) {
      rows.writeInt32LE(100_000 + token, i * rowBytes);
    } else {
      rows.fill(`layer ${stream.layer} token ${token} `, i * rowBytes, (i + 1) * rowBytes);
    }
  });
  return rows;
}

function span(begin, end) {
  return Array.from({ length: end - begin }, (_, i) => begin + i);
}

async function newSession(overrides = {}) {
  const request = { model: model.name, layout: [HIDDEN, KV].map(rangeOf), ...overrides };
  return call(client.sessions, 'createSession', request);
}

async function appendTokens(name, begin, end) {
  const header = { name, modelFingerprint: fingerprint, writeOffset: begin };
  const chunks = LAYOUT.map((stream) => chunk(stream, begin, rowsOf(stream, span(begin, end))));
  const commit = { commit: { tokenCount: end, durability: 'DURABILITY_DISK' } };
  const session = await append(client, header, [...chunks, commit]);
  return session;
}

async function filledSession(tokenCount = 200) {
  const { name } = await newSession();
  return appendTokens(name, 0, tokenCount);
}

/** Checks that a session holds the rows of exactly these tokens, by their numbers when they were saved. */
async function assertHolds(name, tokens) {
  const { header, rows } = await read(client, { name, modelFingerprint: fingerprint });

  assert.equal(header.session.tokenCount, String(tokens.length));
  for (const stream of LAYOUT) {
    assert.deepEqual(rows[streamKey(stream)], rowsOf(stream, tokens), `rows of ${streamKey(stream)}`);
  }
}

/** Awaits a failure with this code and reason, and returns it. */
async function fails(promise, code, reason) {
  const error = await promise.then(
    () => assert.fail(`${reason} expected, the call succeeded`),
    (thrown) => thrown,
  );
  assert.ok(error instanceof CtxcacheError, error.stack);
  assert.deepEqual([error.code, error.reason], [code, reason], error.message);
  return error;
}

// -- the server -----------------------------------------------------------------------------------

test('every service says that it serves', async () => {
  for (const service of SERVICES) {
    const { status } = await call(client.health, 'check', { service });
    assert.equal(status, 'SERVING', service);
  }
});

test('statistics count what the server holds', async () => {
  await newSession();

  const stats = await call(client.admin, 'getStats', {});

  assert.ok(BigInt(stats.sessionCount) >= 1n);
  assert.ok(BigInt(stats.modelCount) >= 1n);
});

// -- models ---------------------------------------------------------------------------------------

test('the fingerprint computed here is the one the server computes', async () => {
  const found = await call(client.models, 'getModel', { name: model.name });

  assert.deepEqual(modelFingerprint(model), found.fingerprint);
});

test('another model under a taken name is refused', async () => {
  const other = { ...model, revision: 'another' };

  await fails(
    call(client.models, 'registerModel', { model: other }),
    'FAILED_PRECONDITION',
    'MODEL_FINGERPRINT_MISMATCH',
  );
});

/** The generation of a session after so many changes. */
function changed(generation, changeCount) {
  return String(BigInt(generation) + BigInt(changeCount));
}

// -- append and read ------------------------------------------------------------------------------

test('200 tokens appended in two parts are on disk and come back byte by byte', async () => {
  const { name, generation } = await newSession();
  const middle = await appendTokens(name, 0, 130);
  const session = await appendTokens(name, 130, 200);

  assert.deepEqual([middle.tokenCount, middle.generation], ['130', changed(generation, 1)]);
  assert.deepEqual(
    [session.tokenCount, session.durableTokenCount, session.generation],
    ['200', '200', changed(generation, 2)],
  );
  assert.deepEqual(session.layout, LAYOUT.map(rangeOf));
  await assertHolds(name, span(0, 200));
});

test('several commits in one append make tokens visible one after the other', async () => {
  const { name, generation } = await newSession();
  const messages = [span(0, 70), span(70, 100)].flatMap((tokens) => [
    ...LAYOUT.map((stream) => chunk(stream, tokens[0], rowsOf(stream, tokens))),
    { commit: { tokenCount: tokens.at(-1) + 1 } },
  ]);

  const session = await append(client, { name, modelFingerprint: fingerprint, writeOffset: 0 }, messages);

  assert.deepEqual([session.tokenCount, session.generation], ['100', changed(generation, 2)]);
  await assertHolds(name, span(0, 100));
});

test('a range of some streams is read without the rest', async () => {
  const { name } = await filledSession();

  const { header, rows } = await read(client, {
    name,
    modelFingerprint: fingerprint,
    streams: [KV, TOKENS].map(rangeOf),
    range: { begin: 60, end: 131 },
  });

  assert.deepEqual(header.streams, [TOKENS, KV].map(rangeOf));
  assert.deepEqual(header.range, { begin: '60', end: '131' });
  assert.deepEqual(Object.keys(rows), [streamKey(TOKENS), streamKey(KV)]);
  assert.deepEqual(rows[streamKey(KV)], rowsOf(KV, span(60, 131)));
  assert.deepEqual(rows[streamKey(TOKENS)], rowsOf(TOKENS, span(60, 131)));
});

test('an empty session reads as a header alone', async () => {
  const { name } = await newSession();

  const { header, rows } = await read(client, { name, modelFingerprint: fingerprint });

  assert.equal(header.session.tokenCount, '0');
  assert.deepEqual(rows, {});
});

test('rows larger than a message are cut into chunks in order', async () => {
  const { name } = await newSession();
  const tokenCount = 30_000;
  const messages = LAYOUT.flatMap((stream) =>
    span(0, tokenCount / 10_000).map((part) =>
      chunk(stream, part * 10_000, rowsOf(stream, span(part * 10_000, (part + 1) * 10_000))),
    ),
  );
  const header = { name, modelFingerprint: fingerprint, writeOffset: 0 };

  await append(client, header, [...messages, { commit: { tokenCount } }]);

  await assertHolds(name, span(0, tokenCount));
  await call(client.sessions, 'deleteSession', { name });
});

test('an append that failed goes on behind its last commit', async () => {
  const { name } = await newSession();
  const header = { name, modelFingerprint: fingerprint, writeOffset: 0 };
  const part = (begin, end) => LAYOUT.map((stream) => chunk(stream, begin, rowsOf(stream, span(begin, end))));
  const damaged = part(100, 200);
  damaged[1].chunk.data = Buffer.from(damaged[1].chunk.data).fill(0, 10, 11);
  const messages = [...part(0, 100), { commit: { tokenCount: 100 } }, ...damaged];

  const error = await fails(append(client, header, messages), 'INVALID_ARGUMENT', 'CHECKSUM_MISMATCH');
  const { tokenCount } = await call(client.sessions, 'getSession', { name });
  await appendTokens(name, Number(tokenCount), 200);

  assert.equal(error.field, 'chunk.data');
  assert.equal(tokenCount, '100');
  await assertHolds(name, span(0, 200));
});

// -- truncate and fork ----------------------------------------------------------------------------

test('keeping the newest tokens keeps the four sinks too', async () => {
  const { name } = await filledSession();

  const session = await call(client.sessions, 'truncateSession', { name, keepRecent: { tokenCount: 50 } });

  assert.equal(session.tokenCount, '54');
  await assertHolds(name, [...span(0, 4), ...span(150, 200)]);
});

test('sinks are dropped only when that is said', async () => {
  const { name } = await filledSession();

  await call(client.sessions, 'truncateSession', { name, keepRecent: { tokenCount: 50, sinkTokenCount: 0 } });

  await assertHolds(name, span(150, 200));
});

test('dropped ranges may overlap and come in any order', async () => {
  const { name } = await filledSession();
  const ranges = [
    { begin: 120, end: 130 },
    { begin: 10, end: 20 },
    { begin: 15, end: 66 },
  ];

  await call(client.sessions, 'truncateSession', { name, drop: { ranges } });

  await assertHolds(name, [...span(0, 10), ...span(66, 120), ...span(130, 200)]);
});

test('after a cut of the newest tokens others follow', async () => {
  const { name } = await filledSession();

  const cut = await call(client.sessions, 'truncateSession', { name, keepFirst: 100 });
  await append(client, { name, modelFingerprint: fingerprint, writeOffset: 100 }, [
    ...LAYOUT.map((stream) => chunk(stream, 100, rowsOf(stream, span(500, 520)))),
    { commit: { tokenCount: 120 } },
  ]);

  assert.equal(cut.tokenCount, '100');
  await assertHolds(name, [...span(0, 100), ...span(500, 520)]);
});

test('what is appended after a truncation follows the tokens that are left', async () => {
  const { name, generation } = await filledSession();
  await call(client.sessions, 'truncateSession', { name, keepRecent: { tokenCount: 50 } });

  const session = await append(client, { name, modelFingerprint: fingerprint, writeOffset: 54 }, [
    ...LAYOUT.map((stream) => chunk(stream, 54, rowsOf(stream, span(200, 210)))),
    { commit: { tokenCount: 64 } },
  ]);

  assert.equal(session.generation, changed(generation, 2));
  await assertHolds(name, [...span(0, 4), ...span(150, 210)]);
});

test('a fork and its source go on independently', async () => {
  const { name } = await filledSession();

  const fork = await call(client.sessions, 'forkSession', { name, tokenCount: 150 });
  await appendTokens(fork.name, 150, 160);
  await call(client.sessions, 'deleteSession', { name });

  await assertHolds(fork.name, span(0, 160));
});

// -- the life of a session ------------------------------------------------------------------------

test('pages of a list together name every session once', async () => {
  const own = { ...model, name: `models/${randomUUID()}` };
  await call(client.models, 'registerModel', { model: own });
  const prefix = randomUUID();
  for (const letter of ['a', 'b', 'c']) {
    await newSession({ sessionId: `${prefix}:${letter}`, model: own.name });
  }

  const names = [];
  let pageToken = '';
  do {
    const page = await call(client.sessions, 'listSessions', { pageSize: 2, pageToken, model: own.name });
    names.push(...page.sessions.map((session) => session.name));
    pageToken = page.nextPageToken;
  } while (pageToken);

  assert.deepEqual(
    names,
    ['a', 'b', 'c'].map((letter) => `sessions/${prefix}:${letter}`),
  );
});

test('an update changes expiry and pin, and what it does not name stays', async () => {
  const { name } = await newSession({ ttl: { seconds: 60 } });

  const pinned = await call(client.sessions, 'updateSession', { name, isPinned: true });
  const longer = await call(client.sessions, 'updateSession', { name, ttl: { seconds: 7200 } });

  assert.deepEqual([pinned.isPinned, pinned.ttl.seconds], [true, '60']);
  assert.deepEqual([longer.isPinned, longer.ttl.seconds], [true, '7200']);
  assert.equal(BigInt(longer.expireTime.seconds) - BigInt(longer.accessTime.seconds), 7200n);
});

test('a deleted session is gone', async () => {
  const { name } = await filledSession();

  await call(client.sessions, 'deleteSession', { name });

  await fails(call(client.sessions, 'getSession', { name }), 'NOT_FOUND', 'SESSION_NOT_FOUND');
});

test('a lookup answers for each session, found or not', async () => {
  const { name } = await filledSession();
  const empty = await newSession();
  const queries = [
    { name, modelFingerprint: fingerprint },
    { name, modelFingerprint: Buffer.alloc(32) },
    { name: empty.name, modelFingerprint: fingerprint },
    { name: 'sessions/nobody', modelFingerprint: fingerprint },
  ];

  const { results } = await call(client.sessions, 'lookupSessions', { queries });

  assert.deepEqual(
    results.map(({ state, reason, tokenCount }) => [state, reason, tokenCount]),
    [
      ['LOOKUP_STATE_HIT', '', '200'],
      ['LOOKUP_STATE_MISS', 'MODEL_FINGERPRINT_MISMATCH', '0'],
      ['LOOKUP_STATE_MISS', 'EMPTY', '0'],
      ['LOOKUP_STATE_MISS', 'SESSION_NOT_FOUND', '0'],
    ],
  );
  assert.deepEqual(
    results[0].kinds.map(({ kind, layers, sizeBytes }) => [kind, layers, sizeBytes]),
    [
      ['STATE_KIND_TOKENS', [{ begin: -1, end: 0 }], '800'],
      ['STATE_KIND_HIDDEN', [{ begin: 0, end: 1 }], '19200'],
      ['STATE_KIND_KV', [{ begin: 1, end: 2 }], '12800'],
    ],
  );
});

// -- errors ---------------------------------------------------------------------------------------

test('a change under an outdated generation is refused and says which one it is', async () => {
  const { name, generation } = await filledSession();

  const error = await fails(
    call(client.sessions, 'truncateSession', { name, ifGenerationMatch: 1, keepFirst: 0 }),
    'ABORTED',
    'GENERATION_MISMATCH',
  );

  assert.deepEqual([error.facts.actual, error.facts.expected], [generation, '1']);
});

test('an append elsewhere than at the end is refused and says where the end is', async () => {
  const { name } = await filledSession();

  const error = await fails(appendTokens(name, 150, 250), 'ABORTED', 'WRITE_OFFSET_MISMATCH');

  assert.deepEqual([error.facts.token_count, error.facts.write_offset], ['200', '150']);
});

test('rows of another model are neither taken nor returned', async () => {
  const { name } = await filledSession();
  const modelFingerprint = Buffer.alloc(32, 7);
  const expected = ['FAILED_PRECONDITION', 'MODEL_FINGERPRINT_MISMATCH'];

  await fails(append(client, { name, modelFingerprint, writeOffset: 200 }, []), ...expected);
  await fails(read(client, { name, modelFingerprint }), ...expected);
});

test('an append that is refused at its header is told why, whatever it still sends', async () => {
  const { name } = await newSession();
  const header = { name, modelFingerprint: fingerprint, writeOffset: 9 };
  const rows = rowsOf(HIDDEN, span(0, 4096));
  async function* chunks(count, pauseMs) {
    for (let i = 0; i < count; i += 1) {
      yield chunk(HIDDEN, 9 + 4096 * i, rows);
      if (pauseMs) {
        await setTimeout(pauseMs);
      }
    }
  }

  // As fast as the server takes them, beyond what it reads of a refused append, and so slowly that it waits for them.
  const sent = [chunks(40), chunks(40), chunks(240), chunks(20, 20), chunks(3, 400), []];
  const appends = sent.map((messages) => append(client, header, messages));

  for (const { facts } of await Promise.all(
    appends.map((refused) => fails(refused, 'ABORTED', 'WRITE_OFFSET_MISMATCH')),
  )) {
    assert.deepEqual([facts.token_count, facts.write_offset], ['0', '9']);
  }
});

test('a commit without the rows of every stream is refused and changes nothing', async () => {
  const { name } = await newSession();
  const header = { name, modelFingerprint: fingerprint, writeOffset: 0 };
  const messages = [
    chunk(TOKENS, 0, rowsOf(TOKENS, span(0, 10))),
    chunk(KV, 0, rowsOf(KV, span(0, 10))),
    { commit: { tokenCount: 10 } },
  ];

  const error = await fails(append(client, header, messages), 'FAILED_PRECONDITION', 'INCOMPLETE_APPEND');

  assert.deepEqual([error.facts.stream, error.facts.row_count], ['layer 0 hidden', '0']);
  assert.equal((await call(client.sessions, 'getSession', { name })).tokenCount, '0');
});

test('a range beyond the end is refused and says where the end is', async () => {
  const { name } = await filledSession();

  const error = await fails(
    read(client, { name, modelFingerprint: fingerprint, range: { begin: 190, end: 201 } }),
    'OUT_OF_RANGE',
    'TOKEN_RANGE_OUT_OF_BOUNDS',
  );

  assert.equal(error.facts.token_count, '200');
});

test('a malformed field is named', async () => {
  const { name } = await newSession();
  const header = { name, modelFingerprint: fingerprint, writeOffset: 0 };
  const cases = [
    ['session_id', () => newSession({ sessionId: '../etc' })],
    ['model', () => newSession({ model: 'no slash' })],
    ['ttl', () => newSession({ ttl: { seconds: 0 } })],
    ['layout[1].kind', () => newSession({ layout: [rangeOf(KV), { layerEnd: 1 }] })],
    ['page_size', () => call(client.sessions, 'listSessions', { pageSize: -1 })],
    ['kept', () => call(client.sessions, 'truncateSession', { name })],
    ['chunk.data', () => append(client, header, [chunk(KV, 0, Buffer.alloc(63))])],
    ['chunk.data', () => append(client, header, [chunk(TOKENS, 0, Buffer.alloc((2 << 20) + 4))])],
  ];

  for (const [field, attempt] of cases) {
    const error = await fails(attempt(), 'INVALID_ARGUMENT', 'INVALID_FIELD');
    assert.equal(error.field, field, error.message);
  }
});

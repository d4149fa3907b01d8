/** What can be checked without a server: checksums and fingerprints against known values. */

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { rangeOf, wireChecksum } from './ctxcache.js';
import { modelFingerprint } from './fingerprint.js';

const KINDS = [
  '',
  'STATE_KIND_TOKENS',
  'STATE_KIND_HIDDEN',
  'STATE_KIND_KV',
  'STATE_KIND_LATENT',
  'STATE_KIND_HIDDEN_INT8',
  'STATE_KIND_KV_INT8',
  'STATE_KIND_HIDDEN_INT4',
  'STATE_KIND_KV_INT4',
  'STATE_KIND_ENGINE_BLOCK',
];
const DTYPES = [
  '',
  'DTYPE_INT32',
  'DTYPE_FLOAT32',
  'DTYPE_FLOAT16',
  'DTYPE_BFLOAT16',
  'DTYPE_INT8',
  'DTYPE_FLOAT8_E4M3',
  'DTYPE_PACKED',
];
const golden = JSON.parse(readFileSync(new URL('../../golden/segments.json', import.meta.url), 'utf8'));

/** Makes the bytes of which docs/chunk_format.md states the checksums. */
function ramp(sizeBytes) {
  return Buffer.from(Array.from({ length: sizeBytes }, (_, i) => (31 * i + 1) % 256));
}

// One per code path of XXH3-64: empty, short, medium, long, and more than one block of stripes.
const VECTORS = [
  [0, '2d06800538d394c2'],
  [3, '04ff10c4faac80e8'],
  [8, '4929784fb2e7a9af'],
  [16, '8a9efe7e6639609b'],
  [100, '6af9dbcb460f7f07'],
  [200, '011eec14a4209fe6'],
  [241, '3bc6fa347f0cfaff'],
  [5000, 'b23c05783c70b269'],
];

for (const [sizeBytes, expected] of VECTORS) {
  test(`the checksum of ${sizeBytes} known bytes is the documented one`, () => {
    assert.equal(
      BigInt(wireChecksum(ramp(sizeBytes)))
        .toString(16)
        .padStart(16, '0'),
      expected,
    );
  });
}

for (const model of golden.models) {
  test(`the fingerprint of ${model.architecture} is the golden one`, () => {
    const fingerprint = modelFingerprint({
      architecture: model.architecture,
      revision: model.revision,
      weightsDigest: model.weights_digest,
      tokenizerDigest: model.tokenizer_digest,
      dtype: DTYPES[model.dtype],
      layerCount: model.layer_count,
      hiddenSize: model.hidden_size,
      kvHeadCount: model.kv_head_count,
      headSize: model.head_size,
      rope: model.rope,
      norm: model.norm,
      isRelocatable: model.is_relocatable,
      settings: model.settings,
      streams: model.streams.map(([layer, kind, rowBytes, dtype]) => ({
        streams: rangeOf({ layer, kind: KINDS[kind] }),
        rowBytes,
        dtype: DTYPES[dtype],
      })),
    });

    assert.equal(fingerprint.toString('hex'), model.fingerprint_hex);
  });
}

/** The fingerprint of a model, by docs/chunk_format.md, and the keys of a prompt, by docs/prefixes.md. */

import { createHash } from 'node:crypto';

const DOMAIN = 'ctxcache.model.v1';
const KINDS = {
  STATE_KIND_TOKENS: 1,
  STATE_KIND_HIDDEN: 2,
  STATE_KIND_KV: 3,
  STATE_KIND_LATENT: 4,
  STATE_KIND_HIDDEN_INT8: 5,
  STATE_KIND_KV_INT8: 6,
  STATE_KIND_HIDDEN_INT4: 7,
  STATE_KIND_KV_INT4: 8,
  STATE_KIND_ENGINE_BLOCK: 9,
  STATE_KIND_KV_AS_CACHED: 10,
  STATE_KIND_HIDDEN_DELTA_INT4: 11,
  STATE_KIND_HIDDEN_DELTA_INT3: 12,
  STATE_KIND_HIDDEN_DELTA_INT2: 13,
};
const DTYPES = {
  DTYPE_INT32: 1,
  DTYPE_FLOAT32: 2,
  DTYPE_FLOAT16: 3,
  DTYPE_BFLOAT16: 4,
  DTYPE_INT8: 5,
  DTYPE_FLOAT8_E4M3: 6,
  DTYPE_PACKED: 7,
};

/** 32 bytes. `model` is a ctxcache.v1.Model; fields left out count as empty, 0 or false. */
export function modelFingerprint(model) {
  const digest = createHash('sha256').update(DOMAIN);
  const facts = [
    ['architecture', model.architecture],
    ['revision', model.revision ?? ''],
    ['weights_digest', model.weightsDigest ?? ''],
    ['tokenizer_digest', model.tokenizerDigest ?? ''],
    ['dtype', DTYPES[model.dtype]],
    ['layer_count', model.layerCount],
    ['hidden_size', model.hiddenSize],
    ['kv_head_count', model.kvHeadCount],
    ['head_size', model.headSize],
    ['rope', model.rope ?? ''],
    ['norm', model.norm ?? ''],
    ['is_relocatable', model.isRelocatable ? 'True' : 'False'],
    ['settings', model.settings ?? ''],
  ];
  for (const [tag, value] of facts) {
    update(digest, tag, Buffer.from(String(value)));
  }
  for (const spec of packedSpecs(model.streams)) {
    update(digest, 'stream', spec);
  }
  return digest.digest();
}

function update(digest, tag, value) {
  const lengths = Buffer.alloc(6);
  lengths.writeUInt16LE(tag.length, 0);
  lengths.writeUInt32LE(value.length, 2);
  digest.update(lengths).update(tag).update(value);
}

function packedSpecs(streams) {
  return streams
    .flatMap(({ streams: { kind, layerBegin, layerEnd }, rowBytes, dtype }) =>
      Array.from({ length: layerEnd - layerBegin }, (_, i) => [
        layerBegin + i,
        KINDS[kind],
        rowBytes,
        DTYPES[dtype],
      ]),
    )
    .filter(([, kind]) => kind !== KINDS.STATE_KIND_TOKENS)
    .sort((a, b) => a[0] - b[0] || a[1] - b[1])
    .map((numbers) => {
      const packed = Buffer.alloc(16);
      numbers.forEach((number, i) => packed.writeInt32LE(number, 4 * i));
      return packed;
    });
}

/**
 * Keys of every 64 tokens of a prompt, 32 bytes each. `layout`: ranges `{ kind, begin, end }` by kind's number, ordered
 * and as few as possible. `tokenIds`: 4 bytes each, little endian. `contents`: `{ begin, end, digest }` in order.
 */
export function prefixKeys({ tenant, fingerprint, layout, tokenIds, salt = '', contents = [] }) {
  const ranges = Buffer.concat(layout.map(({ kind, begin, end }) => Buffer.from(Int32Array.of(kind, begin, end).buffer)));
  const layoutTag = createHash('sha256').update(ranges).digest();
  const scope = ['ctxcache.prefix.v1', tenant, fingerprint, layoutTag, salt];
  const keys = [];
  for (let begin = 0; begin + 256 <= tokenIds.length; begin += 256) {
    const digest = createHash('sha256');
    const first = begin / 4;
    const behind = contents
      .filter((one) => one.begin < first + 64 && one.end > first)
      .flatMap((one) => [
        Buffer.from(Int32Array.of(Math.max(one.begin - first, 0), Math.min(one.end - first, 64)).buffer),
        one.digest,
      ]);
    const fields = [...scope, keys.at(-1) ?? Buffer.alloc(32), tokenIds.subarray(begin, begin + 256)];
    for (const field of behind.length ? [...fields, Buffer.concat(behind)] : fields) {
      const bytes = Buffer.from(field);
      digest.update(Buffer.from(Uint32Array.of(bytes.length).buffer)).update(bytes);
    }
    keys.push(digest.digest());
  }
  return keys;
}

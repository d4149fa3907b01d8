"""Writes segments.json: the chunk format, version 1, as facts and bytes.

    python tests/golden/make.py

Run it to add a case. A change to a case that is there is a change of the format, and needs a new
version of it. Other implementations can be checked against the file without reading ours.
"""

import json
from pathlib import Path

from ctxcache.format.header import SegmentHeader, header_checksum
from ctxcache.format.identity import SegmentIdentity, chunk_checksum
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS_SPEC, DType, StateKind, Stream, StreamSpec

GOLDEN = Path(__file__).parent / "segments.json"
NOTE = (
    "The chunk format of ctxcache, version 1. Streams are [layer, kind, row bytes, dtype]. Bytes and hashes are hex, "
    "hashes most significant digit first. Byte i of stream number n is (31*i + 7*n + 1) mod 256, for token_count rows."
)


def rows(stream_number: int, size_bytes: int) -> bytes:
    """Make the known bytes of a chunk; the note in the file says how."""
    return bytes((31 * i + 7 * stream_number + 1) % 256 for i in range(size_bytes))


def kv_model() -> ModelSpec:
    """Describe a model with KV on two layers and hidden states on one."""
    return ModelSpec(
        model_id="not part of the fingerprint",
        architecture="LlamaForCausalLM",
        revision="main",
        weights_digest="sha256:00ff",
        tokenizer_digest="sha256:ff00",
        dtype=DType.BFLOAT16,
        layer_count=2,
        hidden_size=48,
        kv_head_count=3,
        head_size=8,
        rope="theta=10000",
        norm="rms,eps=1e-05",
        is_relocatable=True,
        streams=(
            StreamSpec(Stream(0, StateKind.HIDDEN), 96, DType.BFLOAT16),
            StreamSpec(Stream(0, StateKind.KV), 96, DType.BFLOAT16),
            StreamSpec(Stream(1, StateKind.KV), 96, DType.BFLOAT16),
        ),
        settings='{"attention_scale":0.25}',
    )


def latent_model() -> ModelSpec:
    """Describe a model with a latent state, not relocatable, names beyond ASCII."""
    return ModelSpec(
        model_id="",
        architecture="Größe",
        revision="",
        weights_digest="",
        tokenizer_digest="",
        dtype=DType.FLOAT16,
        layer_count=161,
        hidden_size=1,
        kv_head_count=1,
        head_size=1,
        rope="",
        norm="",
        is_relocatable=False,
        streams=tuple(StreamSpec(Stream(layer, StateKind.LATENT), 2, DType.FLOAT16) for layer in range(161)),
    )


def model_case(spec: ModelSpec) -> dict[str, object]:
    """State a model and its fingerprint."""
    facts = {name: getattr(spec, name) for name in ModelSpec.__slots__ if name != "streams"}
    return facts | {"streams": streams(spec.streams), "fingerprint_hex": spec.fingerprint().hex()}


def streams(specs: tuple[StreamSpec, ...]) -> list[tuple[int, ...]]:
    """State streams as numbers."""
    return [(spec.stream.layer, spec.stream.kind, spec.row_bytes, spec.dtype) for spec in specs]


def segment_case(segment_id: int, identity: SegmentIdentity, layout: SegmentLayout) -> dict[str, object]:
    """State a segment, its layout and checksums, and the bytes of its header."""
    seed = identity.seed()
    checksums = tuple(
        chunk_checksum(seed, spec.stream, rows(number, spec.row_bytes * identity.token_count))
        for number, spec in enumerate(layout.specs)
    )
    header = SegmentHeader(segment_id, identity, layout, checksums).encode()
    return {
        "segment_id": segment_id,
        "tenant": identity.tenant,
        "session_uid_hex": identity.session_uid.hex(),
        "generation": identity.generation,
        "begin": identity.begin,
        "token_count": identity.token_count,
        "model_fingerprint_hex": identity.model_fingerprint.hex(),
        "segment_tokens": layout.segment_tokens,
        "streams": streams(layout.specs),
        "header_bytes": layout.header_bytes,
        "size_bytes": layout.size_bytes,
        "offsets": layout.offsets,
        "identity_seed_hex": f"{seed:016x}",
        "chunk_checksums_hex": [f"{checksum:016x}" for checksum in checksums],
        "header_checksum_hex": f"{header_checksum(header):016x}",
        "header_hex": header.hex(),
    }


def cases() -> dict[str, list[dict[str, object]]]:
    """State everything."""
    kv, latent = kv_model(), latent_model()
    ascending = bytes(range(16))
    full = SegmentIdentity("acme", ascending, 7, 128, 64, kv.fingerprint())
    short = SegmentIdentity("", bytes(16), 0, 0, 1, bytes(32))
    wide = SegmentIdentity(
        "тенант/" + "x" * 115, b"\xff" * 16, (1 << 63) - 1, 1 << 40, 3, latent.fingerprint()
    )
    return {
        "models": [model_case(kv), model_case(latent)],
        "segments": [
            segment_case(1, full, SegmentLayout(kv.resolve(spec.stream for spec in kv.streams[1:]))),
            segment_case(0, short, SegmentLayout((TOKENS_SPEC,))),
            segment_case(
                (1 << 64) - 1, wide, SegmentLayout(latent.resolve(s.stream for s in latent.streams), 16)
            ),
        ],
    }


def as_text(groups: dict[str, list[dict[str, object]]]) -> str:
    """Write JSON with one line per fact, so that a change shows as what it is."""
    parts = [f'"note": {json.dumps(NOTE)}']
    for name, group in groups.items():
        lines = (
            ",\n".join(f'"{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in case.items())
            for case in group
        )
        parts.append(f'"{name}": [\n' + ",\n".join(f"{{\n{text}\n}}" for text in lines) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    GOLDEN.write_text(as_text(cases()), encoding="utf-8")

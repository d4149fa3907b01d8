"""Writes segments.json: the chunk format, version 2, as facts and bytes.

    python tests/golden/make.py

Run it to add a case. A change to a case that is there is a change of the format, and needs a new
version of it. Other implementations can be checked against the file without reading ours.
"""

import json
import struct
from pathlib import Path

from ctxcache.format.checksums import chunk_checksum
from ctxcache.format.layout import SegmentHeader, SegmentIdentity, SegmentLayout, header_checksum
from ctxcache.format.model import ModelSpec
from ctxcache.format.packing import PACKINGS
from ctxcache.format.streams import TOKENS_SPEC, DType, StateKind, Stream, StreamSpec

GOLDEN = Path(__file__).parent / "segments.json"
NOTE = (
    "The chunk format of ctxcache, version 2. Streams are [layer, kind, row bytes, dtype]. Bytes and hashes"
    " are hex, hashes most significant digit first. Byte i of stream number n is (31*i + 7*n + 1) mod 256,"
    " for token_count rows. Elements of packed rows are those of float32 in hex, little endian."
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


def packed_model() -> ModelSpec:
    """Describe a model that saves every packed kind of its one layer, and hidden states as they are."""
    row_bytes = {kind: packing.row_bytes(96) for kind, packing in PACKINGS.items()}
    return ModelSpec(
        model_id="",
        architecture="Packed",
        revision="",
        weights_digest="w",
        tokenizer_digest="t",
        dtype=DType.BFLOAT16,
        layer_count=1,
        hidden_size=96,
        kv_head_count=3,
        head_size=16,
        rope="theta=10000",
        norm="rms,eps=1e-05",
        is_relocatable=True,
        streams=(
            StreamSpec(Stream(0, StateKind.HIDDEN), 192, DType.BFLOAT16),
            *(StreamSpec(Stream(0, kind), size, DType.PACKED) for kind, size in row_bytes.items()),
        ),
    )


def packed_row_case(kind: StateKind, element_count: int) -> dict[str, object]:
    """State a packed row by its bytes and its elements."""
    packing = PACKINGS[kind]
    layout = packing.layout(element_count)
    codes = [(37 * i + 11) % (1 << packing.bits) for i in range(element_count)]
    scales = [(i + 1) / 512 for i in range(layout.group_count)]
    zeros = [-0.75 * i - 0.125 for i in range(layout.group_count)]
    places = [
        (element_count - 1) * i // max(layout.outlier_count - 1, 1) for i in range(layout.outlier_count)
    ]
    outliers = [(-1) ** i * 23_737.5 * 10 ** (9 * i) for i in range(layout.outlier_count)]
    row = bytearray(layout.row_bytes)
    for i, code in enumerate(codes):
        if packing.bits == 8:
            row[i] = code
        else:
            row[i // 2] |= code << i % 2 * 4
    struct.pack_into(f"<{len(outliers)}f", row, layout.outliers, *outliers)
    struct.pack_into(f"<{len(scales)}e", row, layout.scales, *scales)
    struct.pack_into(f"<{len(zeros)}e", row, layout.zeros, *zeros)
    struct.pack_into(f"<{len(places)}H", row, layout.places, *places)
    elements = [
        zeros[i // packing.group_size] + code * scales[i // packing.group_size]
        for i, code in enumerate(codes)
    ]
    for place, outlier in zip(places, outliers, strict=True):
        elements[place] = outlier
    return {
        "kind": kind,
        "element_count": element_count,
        "row_hex": row.hex(),
        "elements_hex": struct.pack(f"<{element_count}f", *elements).hex(),
    }


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
        "models": [model_case(kv), model_case(latent), model_case(packed_model())],
        "segments": [
            segment_case(1, full, SegmentLayout(kv.resolve(spec.stream for spec in kv.streams[1:]))),
            segment_case(0, short, SegmentLayout((TOKENS_SPEC,))),
            segment_case(
                (1 << 64) - 1, wide, SegmentLayout(latent.resolve(s.stream for s in latent.streams), 16)
            ),
        ],
        "packed_rows": [packed_row_case(kind, count) for kind in PACKINGS for count in (96, 70, 2)],
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

"""The chunk format against vectors that are kept with the code: bytes on old disks stay readable."""

import json
from pathlib import Path
from typing import Any

import pytest

from ctxcache.format.checksums import chunk_checksum
from ctxcache.format.layout import (
    SegmentHeader,
    SegmentIdentity,
    SegmentLayout,
    decode_header,
    header_checksum,
)
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "segments.json").read_text(encoding="utf-8"))
Case = dict[str, Any]
each_segment = pytest.mark.parametrize(
    "case", GOLDEN["segments"], ids=lambda case: f"segment {case['segment_id']}"
)
each_model = pytest.mark.parametrize("case", GOLDEN["models"], ids=lambda case: case["architecture"])


def specs(case: Case) -> tuple[StreamSpec, ...]:
    """Read a case's streams."""
    return tuple(
        StreamSpec(Stream(layer, StateKind(kind)), row_bytes, DType(dtype))
        for layer, kind, row_bytes, dtype in case["streams"]
    )


def identity(case: Case) -> SegmentIdentity:
    """Read a case's identity."""
    return SegmentIdentity(
        case["tenant"],
        bytes.fromhex(case["session_uid_hex"]),
        case["generation"],
        case["begin"],
        case["token_count"],
        bytes.fromhex(case["model_fingerprint_hex"]),
    )


def header(case: Case) -> SegmentHeader:
    """Read a case's header from its facts."""
    checksums = tuple(int(checksum, 16) for checksum in case["chunk_checksums_hex"])
    return SegmentHeader(
        case["segment_id"], identity(case), SegmentLayout(specs(case), case["segment_tokens"]), checksums
    )


@each_segment
def test_facts_encode_to_the_golden_bytes(case: Case) -> None:
    """The encoded facts are, byte for byte, those of the golden file."""
    encoded = header(case).encode()

    assert encoded.hex() == case["header_hex"]
    assert f"{header_checksum(encoded):016x}" == case["header_checksum_hex"]


@each_segment
def test_golden_bytes_decode_to_the_facts(case: Case) -> None:
    """The golden bytes are read, and padding behind them does not matter."""
    encoded = bytes.fromhex(case["header_hex"])

    assert decode_header(encoded) == header(case)
    assert decode_header(encoded.ljust(case["header_bytes"], b"\0")) == header(case)


@each_segment
def test_chunks_lie_where_the_golden_layout_says(case: Case) -> None:
    """Offsets and sizes are part of the format."""
    layout = SegmentLayout(specs(case), case["segment_tokens"])

    assert (layout.header_bytes, layout.size_bytes) == (case["header_bytes"], case["size_bytes"])
    assert list(layout.offsets) == case["offsets"]


@each_segment
def test_known_bytes_have_the_golden_checksums(case: Case) -> None:
    """Identity, stream and bytes hash to what they always did."""
    seed = identity(case).seed()
    for number, (spec, expected) in enumerate(zip(specs(case), case["chunk_checksums_hex"], strict=True)):
        data = bytes((31 * i + 7 * number + 1) % 256 for i in range(spec.row_bytes * case["token_count"]))
        assert f"{chunk_checksum(seed, spec.stream, data):016x}" == expected

    assert f"{seed:016x}" == case["identity_seed_hex"]


@each_model
def test_models_have_the_golden_fingerprints(case: Case) -> None:
    """A fingerprint never changes: if it did, everything saved under it would be lost."""
    facts = {name: value for name, value in case.items() if name not in {"streams", "fingerprint_hex"}}
    facts["dtype"] = DType(facts["dtype"])
    spec = ModelSpec(streams=specs(case), **facts)

    assert spec.fingerprint().hex() == case["fingerprint_hex"]

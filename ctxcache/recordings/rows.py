"""Made-up rows of the sizes that a recording tells, and the model that they are of. No content: bytes drawn once."""

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ctxcache.client import CallerModel
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, TOKENS_SPEC, DType, StateKind, Stream, StreamSpec
from ctxcache.recordings.reading import Layout

WRITE_BYTES = 64 << 20
"""What is written at a time, all streams together, or a segment."""


class MadeUp:
    """A model whose sessions take as much as those of a recorded layout."""

    def __init__(self, layout: Layout) -> None:
        sizes = [row_bytes for row_bytes, count in layout.streams for _ in range(count)]
        specs = [
            StreamSpec(Stream(layer, StateKind.KV), row_bytes, DType.INT8)
            for layer, row_bytes in enumerate(sizes)
        ]
        digest = hashlib.sha256(repr(layout.streams).encode()).hexdigest()[:16]
        spec = ModelSpec(
            model_id=f"replay-{digest}", architecture="Replay", revision="", weights_digest="",
            tokenizer_digest="", dtype=DType.INT8, layer_count=len(sizes), hidden_size=1, kv_head_count=1,
            head_size=1, rope="", norm="", is_relocatable=True, streams=tuple(specs),
        )  # fmt: skip
        self.model = CallerModel(spec)
        self.streams = tuple(spec.stream for spec in specs)
        self._sizes = {TOKENS: TOKENS_SPEC.row_bytes} | {spec.stream: spec.row_bytes for spec in specs}
        segments = WRITE_BYTES // (sum(self._sizes.values()) * SEGMENT_TOKENS)
        self.most_tokens = max(segments, 1) * SEGMENT_TOKENS
        """That are written at a time."""
        draw = np.random.default_rng(0)
        self._bytes = draw.integers(0, 256, self.most_tokens * max(self._sizes.values()), np.uint8)

    def rows(self, token_count: int) -> Mapping[Stream, npt.NDArray[np.uint8]]:
        """Rows of so many tokens of every stream, [token_count, row_bytes]; at most `most_tokens`."""
        return {
            stream: self._bytes[: token_count * size].reshape(token_count, size)
            for stream, size in self._sizes.items()
        }

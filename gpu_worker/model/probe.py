"""Probing: a model's output for 16 tokens, layer by layer, to be compared with what it was before.

The tokens and the places whose values are kept follow from the fingerprint. A pass goes through the
engine's own way of running the model. Worst case: one pass of 16 tokens when an engine is made; a difference
that shows only at later tokens is not seen.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ctxcache.format.model import ModelProbe, ModelSpec
from ctxcache.format.streams import DType
from gpu_worker.families import Adapter
from gpu_worker.forms.rows import row_dtype

TOKEN_COUNT = 16
GROUP_SIZE = 64
VALUE_COUNT = 4096
"""The most values that are kept: large models keep fewer of each layer."""
Run = Callable[[list[int]], object]
"""A pass over token ids as a sequence of its own."""


def probe_of(adapter: Adapter, spec: ModelSpec, run: Run) -> ModelProbe:
    """The model's output for the tokens that `spec`'s fingerprint gives.

    Keeps values of each layer's output; the last layer's is normed.
    """
    seed = spec.fingerprint()
    vocabulary = int(adapter.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    token_ids = (_numbers(seed, 0, TOKEN_COUNT) % vocabulary).tolist()
    kept: list[Tensor] = []
    hooks = [
        layer.block.register_forward_pre_hook(
            lambda _, args, kwargs: kept.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for layer in adapter.layers[1:]
    ]
    # Values are of each layer's output, which is the next one's input; the last one has none behind it:
    #
    #     layer 0 ─► [in 1] ─► layer 1 ─► [in 2] ─► ... ─► last layer ─► norm ─► [output]
    hooks.append(adapter.base.register_forward_hook(lambda _, __, output: kept.append(output[0])))
    try:
        with torch.no_grad():
            run(token_ids)
    finally:
        for hook in hooks:
            hook.remove()
    # The first token takes huge values in many models, beside which nothing else would be seen.
    kept = [rows.reshape(TOKEN_COUNT, -1)[1:].flatten() for rows in kept]
    group_size = max(1, min(GROUP_SIZE, VALUE_COUNT // len(kept)))
    groups = [
        rows[torch.from_numpy(_numbers(seed, number, group_size) % len(rows)).to(rows.device)]
        .float()
        .cpu()
        .numpy()
        for number, rows in enumerate(kept, start=1)
    ]
    # float32 whatever the model's type: the caller compares engines of different types.
    values = np.concatenate(groups).astype("<f4").tobytes()
    return ModelProbe(_precision(adapter.model), tuple(token_ids), group_size, values)


def _numbers(seed: bytes, purpose: int, count: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """Numbers of 32 bits that look random and are the same everywhere."""
    stream = hashlib.shake_256(b"ctxcache.probe.v1" + seed + purpose.to_bytes(4, "little")).digest(4 * count)
    return np.frombuffer(stream, "<u4").astype(np.int64)


def _precision(model: PreTrainedModel) -> DType:
    """The type that values are rounded to on the way: products of float32 may be those of a coarser one."""
    own = row_dtype(model.dtype)
    rounded = {"highest": own, "high": DType.FLOAT16, "medium": DType.BFLOAT16}[
        torch.get_float32_matmul_precision()
    ]
    return rounded if own is DType.FLOAT32 else own

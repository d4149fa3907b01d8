"""A loaded model's shape, from its adapter and its weights. Worst case: an expert's weights all count.

Then `linear_flops` are too many; a measured profile does not use them.
"""

from collections import Counter

from ctxcache.format.streams import StateKind
from gpu_worker.families import Adapter
from gpu_worker.families.adapter import DecoderLayer
from gpu_worker.planning.shape import MULTIPLY_ADD_FLOPS, LayerKind, LayerShape, ModelShape


def model_shape(adapter: Adapter, name: str) -> ModelShape:
    """Describe the model that `adapter` knows."""
    # Like layers share one object, by which the planner knows them.
    known: dict[LayerShape, LayerShape] = {}
    shapes = (_layer_shape(adapter, number, layer) for number, layer in enumerate(adapter.layers))
    layers = tuple(known.setdefault(shape, shape) for shape in shapes)
    return ModelShape(name, layers, adapter.has_token_inputs)


def representatives(shape: ModelShape) -> dict[LayerShape, int]:
    """Return one layer of each sort, from the middle of its kind if it has more than two."""
    seen: Counter[LayerShape] = Counter()
    counts = Counter(shape.layers)
    by_sort = {}
    for i, layer in enumerate(shape.layers):
        if seen[layer] == counts[layer] // 2:
            by_sort[layer] = i
        seen[layer] += 1
    return by_sort


def _layer_shape(adapter: Adapter, number: int, layer: DecoderLayer) -> LayerShape:
    config = adapter.model.config.get_text_config(decoder=True)
    element_bytes = adapter.model.dtype.itemsize
    # Where layers differ, transformers refuses to give one number for all.
    own = by_layer[number] if (by_layer := getattr(config, "per_layer_config", None)) else config
    head_count = int(getattr(own, "num_attention_heads", 0) or 0) if layer.has_rows else 0
    head_size = getattr(own, "head_dim", None) or config.hidden_size // max(head_count, 1)
    row_size = sum(half.size for half in adapter.halves_of(number))
    # Matrices alone: norms and biases are additions per element, which do not count beside products.
    weights = sum(parameter.numel() for parameter in layer.block.parameters() if parameter.ndim > 1)
    return LayerShape(
        kind=_kind(adapter, layer),
        hidden_row_bytes=adapter.hidden_size * element_bytes,
        kv_row_bytes=row_size * element_bytes,
        project_flops=float(
            MULTIPLY_ADD_FLOPS * (adapter.hidden_size * row_size * layer.has_rows + _mixed(layer))
        ),
        linear_flops=float(MULTIPLY_ADD_FLOPS * weights),
        attention_flops=float(2 * MULTIPLY_ADD_FLOPS * head_count * head_size),
        window=layer.window,
        state_bytes=0 if layer.recurrence is None else layer.recurrence.state_bytes,
        state_flops=float(MULTIPLY_ADD_FLOPS * _mixed(layer)),
        element_bytes=element_bytes,
        is_from_hidden=layer.recurrence is not None or StateKind.HIDDEN in adapter.kinds,
        has_own_rows=layer.recurrence is None,
        is_as_cached=adapter.kind is StateKind.KV_AS_CACHED,
    )


def _mixed(layer: DecoderLayer) -> int:
    """Multiply-adds of a mixer's matrices for one token; its scan is small beside them."""
    if layer.recurrence is None:
        return 0
    return sum(parameter.numel() for parameter in layer.recurrence.mixer.parameters() if parameter.ndim > 1)


def _kind(adapter: Adapter, layer: DecoderLayer) -> LayerKind:
    if layer.recurrence is not None:
        return LayerKind.LINEAR
    if not layer.has_rows:
        return LayerKind.SHARED
    if adapter.kind is StateKind.LATENT:
        return LayerKind.LATENT
    return LayerKind.FULL if layer.window is None else LayerKind.SLIDING

"""Hidden states, row by row: the input of each decoder layer before its norm, and K and V out of it again.

vLLM gives a layer its input in two parts, which its norm adds up: a row is their sum, as other engines have
it. K and V come back by the layer's own code, in one of two ways:

    lean    the layer up to its projection; the K and V part of that; norm of K; rotary embedding of K
    whole   the layer up to its attention, which also computes Q and throws it away

The lean way is used where it gives the same on the loaded model. Where vLLM keeps a projection's weights
packed for its kernels alone, the K and V part of it is a copy: (K + V) x hidden size elements a layer.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import QKVParallelLinear, UnquantizedLinearMethod

from ctxcache.format.streams import StateKind
from gpu_worker.engines.link import Refused
from gpu_worker.engines.vllm.pass_rows import ALLOWED, AttentionLayer, Halves, PassRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.ctxcache")

INPUT, REST = "hidden_states", "residual"
"""The names that vLLM's decoder layers give to their input, and to the part of it not added yet."""
# A layer of vLLM, and where the two ways end it:
#
#     (hidden_states, residual) ─ sum, norm ─► qkv_proj ─► split ─► k_norm ─► rotary ─► attention
#                                              ▲                                        ▲
#                                              lean: ended here, K and V's part alone   whole: ended here
KNOWN = {INPUT, REST, "positions"}
TRIAL_TOKENS = 4
Way = functools.partial[Halves]
"""A layer's input [T, D] and positions [T] -> K and V."""
Norm = Callable[[Tensor], Tensor]
"""K before its positions [T, H*C] -> the same, normed as the layer does."""


class HiddenRows(PassRows):
    """Inputs of the decoder layers of an engine."""

    kind = StateKind.HIDDEN

    def _listen(self) -> None:
        self._ways: dict[str, Way] = {}
        for number, layer in enumerate(self._layers):
            signature = inspect.signature(layer.block.forward)
            asked = {name for name, one in signature.parameters.items() if _is_asked_for(one)}
            # A layer that takes more arguments than these computes other rows from the same input.
            if INPUT not in signature.parameters or asked - KNOWN:
                names = ", ".join(sorted(asked - KNOWN)) or f"no {INPUT}"
                raise Refused(f"layer {layer.name} takes {names}: not by its input alone; save state=blocks")
            hook = functools.partial(self._input_comes, number, signature)
            layer.block.register_forward_pre_hook(hook, with_kwargs=True)

    def renewed(self) -> None:
        """See EngineState. Parts of projections may be copies of the old weights."""
        self._ways.clear()

    def _prove(self, model: nn.Module, config: "VllmConfig", block_count: int) -> None:
        super()._prove(model, config, block_count)
        lean_count = sum(way.func is _lean for way in self._ways.values())
        logger.info("%d of %d layers are restored without computing Q", lean_count, len(self._layers))

    def _input_comes(
        self,
        number: int,
        signature: inspect.Signature,
        _block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if not self._is_listening:
            return
        given = signature.bind(*args, **kwargs).arguments
        rest = given.get(REST)
        # The first layer has no residual yet.
        self._emit(number, given[INPUT] if rest is None else given[INPUT] + rest)

    def _halves(self, layer: AttentionLayer, rows: Tensor, positions: Tensor) -> Halves:
        way = self._ways.get(layer.name)
        if way is None:
            way = self._ways[layer.name] = best_way(layer, self._dtype)
        return way(rows, positions)


def best_way(layer: AttentionLayer, dtype: torch.dtype) -> Way:
    """The lean way where it computes what the whole way computes, else the whole way."""
    whole = functools.partial(_whole, layer)
    # The hooks stay: another thread runs the engine's passes, and a pass must not see hooks change.
    _end_in(layer.attention)
    projections = [child for child in layer.parent.children() if isinstance(child, QKVParallelLinear)]
    if len(projections) != 1 or not isinstance(projections[0].quant_method, UnquantizedLinearMethod):
        return whole
    _end_in(projections[0])
    size = projections[0].hidden_size
    device = layer.cache.device
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn((TRIAL_TOKENS, size), generator=draw).to(device, dtype)
    # Positions begin at 1: at 0 a rotary embedding changes nothing.
    positions = torch.arange(1, TRIAL_TOKENS + 1, device=device)
    # Each way gets a copy: vLLM's fused norms write into their input.
    expected = whole(rows.clone(), positions)
    projection = KvProjection(projections[0], dtype)
    for lean in _lean_ways(layer, projections[0], projection):
        try:
            computed = lean(rows.clone(), positions)
        except (RuntimeError, TypeError, ValueError):
            # The layer's norm is over another part of K than this way gives to it.
            continue
        # A way is chosen by what it computes on this model, not by the names of its modules.
        if all(_is_near(one, other, ALLOWED[dtype]) for one, other in zip(expected, computed, strict=True)):
            return lean
    return whole


class KvProjection:
    """The K and V part of a layer's joint projection, without Q."""

    def __init__(self, joint: QKVParallelLinear, dtype: torch.dtype) -> None:
        head_size, value_size = joint.head_size, joint.v_head_size
        begin = joint.num_heads * head_size
        self._sizes = [joint.num_kv_heads * head_size, joint.num_kv_heads * value_size]
        bias = getattr(joint, "bias", None)
        self._bias = None if bias is None else bias[begin:].to(dtype)
        if joint.weight.ndim == 2 and len(joint.weight) == begin + sum(self._sizes):
            self._weight = joint.weight[begin:]
            return
        # The weights are packed: the projection of each unit vector is a column of them.
        device = joint.weight.device
        size: int = joint.hidden_size
        # Without the bias, which is added in `__call__`.
        units = torch.eye(size, dtype=dtype, device=device)
        output = joint.quant_method.apply(joint, units, None)
        self._weight = output[:, begin:].t().contiguous()

    def __call__(self, normed: Tensor) -> Sequence[Tensor]:
        """Normed [T, D] -> K and V before norm and positions, [T, H*C], [T, H*C_v]."""
        both = torch.nn.functional.linear(normed, self._weight, self._bias)
        return torch.split(both, self._sizes, dim=1)


def _lean_ways(layer: AttentionLayer, joint: nn.Module, project: KvProjection) -> Iterator[Way]:
    norm = getattr(layer.parent, "k_norm", None)
    norms: list[Norm] = [lambda key: key]
    if isinstance(norm, nn.Module):
        size = layer.attention.head_size
        # The layer norms each head by itself, or all heads as one row: the trial shows which.
        norms = [lambda key: norm(key.reshape(len(key), -1, size)).reshape(len(key), -1), norm]
    for normalised in norms:
        yield functools.partial(_lean, layer, joint, project, normalised)


def _lean(
    layer: AttentionLayer,
    joint: nn.Module,
    project: KvProjection,
    normalised: Norm,
    rows: Tensor,
    positions: Tensor,
) -> Halves:
    key, value = project(_taken(joint, layer.block, rows, positions)[0])
    key = normalised(key.contiguous())
    rotary = getattr(layer.parent, "rotary_emb", None)
    if isinstance(rotary, nn.Module):
        key = rotary(positions, key)[0]
    return layer.halves(key, value.contiguous())


def _whole(layer: AttentionLayer, rows: Tensor, positions: Tensor) -> Halves:
    _query, key, value = _taken(layer.attention, layer.block, rows, positions)[:3]
    return layer.halves(key, value)


class _Arrived(Exception):
    """No error: it ends a layer that has computed enough, and carries the next module's arguments."""


class _Wanted(threading.local):
    """The module before which this thread ends a layer. The engine's own passes want none."""

    module: nn.Module | None = None


_WANTED = _Wanted()


def _end_in(module: nn.Module) -> None:
    # Add the hook once, although other weights begin another search for the best way.
    if _end_where_wanted not in module._forward_pre_hooks.values():  # noqa: SLF001  torch lists them nowhere else
        module.register_forward_pre_hook(_end_where_wanted, prepend=True, with_kwargs=True)


def _end_where_wanted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _WANTED.module is module:
        # An exception ends a layer from within without a change to its code.
        raise _Arrived(*args, *kwargs.values())


def _taken(module: nn.Module, block: nn.Module, rows: Tensor, positions: Tensor) -> tuple[Any, ...]:
    """The arguments that a layer gives to its own module for this input.

    Hooks on the layer do not see this call.
    """
    given = {INPUT: rows, REST: None, "positions": positions}
    wanted = inspect.signature(block.forward).parameters
    _WANTED.module = module
    try:
        block.forward(**{name: one for name, one in given.items() if name in wanted})
    except _Arrived as arrived:
        return arrived.args
    finally:
        _WANTED.module = None
    raise Refused(f"{type(block).__name__} does not use {type(module).__name__}")


def _is_asked_for(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )


def _is_near(expected: Tensor, actual: Tensor, allowed: float) -> bool:
    expected, actual = expected.float(), actual.float()
    return bool((expected - actual).abs().max() <= allowed * expected.abs().max())

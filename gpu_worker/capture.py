"""Capture: hooks that hand over the rows of new tokens while the model runs.

Knows one model through its adapter, not what the sink does with rows. Costs nothing unless
attached. Worst case: on a GPU, rows asked for on the host are copied layer by layer and each copy
waits for that layer.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import unpacked
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.errors import UnsupportedBatch
from gpu_worker.families import Adapter
from gpu_worker.families.adapter import Handle, without_gradient

Sink = Callable[[int, StateKind, Tensor], None]
"""(layer, kind, rows [T_new, row]): called once per stream and forward pass, layer 0 first."""


class Capture:
    """Context manager: within it, each forward pass of the model feeds the sink.

    Rows are what the engine's cache needs, bit for bit: HIDDEN the layer's input, KV and LATENT
    the halves before positions. Those of packed kinds are as wide as the others: packing takes time, and
    is for whoever saves. They may share memory with activations: the sink must not write to
    them. Restoring within it captures nothing. Batches of more than one sequence raise
    UnsupportedBatch out of the forward pass. Passes are taken to be unpadded, and rows of tokens
    that the engine later crops (assisted decoding) are the caller's to drop.
    """

    def __init__(
        self, adapter: Adapter, streams: Iterable[Stream], sink: Sink, *, is_on_host: bool = True
    ) -> None:
        """`streams`: those to capture; token ids among them are passed over, the caller has them.

        Raises InvalidArgument(field="streams") for one the model does not have.
        """
        self._adapter = adapter
        self._streams = sorted(s for s in set(streams) if s.kind is not StateKind.TOKENS)
        for stream in self._streams:
            is_known = 0 <= stream.layer < len(adapter.layers)
            if not is_known or adapter.element_count(stream.kind, stream.layer) is None:
                raise InvalidArgument(field="streams", problem=f"{adapter.architecture} has no {stream}")
        self._sink = sink
        self._is_on_host = is_on_host
        self._is_in_pass = False
        self._hooks: list[Handle] = []

    def __enter__(self) -> Self:
        self._hooks = [*self._watch_passes()]
        for stream in self._streams:
            self._hooks += self._watch(stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._is_in_pass = False

    def _watch_passes(self) -> Iterable[RemovableHandle]:
        base = self._adapter.base
        yield base.register_forward_pre_hook(self._begin_pass)
        # Also after an error: a pass that broke must not leave capture listening to a restore.
        yield base.register_forward_hook(self._end_pass, always_call=True)
        yield self._adapter.layers[0].block.register_forward_pre_hook(_check_batch, with_kwargs=True)

    def _begin_pass(self, _base: nn.Module, _args: object) -> None:
        self._is_in_pass = True

    def _end_pass(self, _base: nn.Module, _args: object, _output: object) -> None:
        self._is_in_pass = False

    def _watch(self, stream: Stream) -> Sequence[Handle]:
        decoder = self._adapter.layers[stream.layer]
        if unpacked(stream.kind) is not StateKind.HIDDEN:
            pack = self._adapter.pack
            return decoder.projection.watch(lambda first, second: self._emit(stream, pack(first, second)))

        # Any: a hook sees whatever the model passes to its layer.
        def hook(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A residual stream in float32 (Mamba 2): its norm rounds it first, or no proof passes.
            rows = without_gradient(_layer_input(args, kwargs)[0])
            self._emit(stream, rows.to(self._adapter.model.dtype))

        return [decoder.block.register_forward_pre_hook(hook, with_kwargs=True)]

    def _emit(self, stream: Stream, rows: Tensor) -> None:
        if self._is_in_pass:
            self._sink(stream.layer, stream.kind, rows.cpu() if self._is_on_host else rows)


def _layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    # Any: as above. Families pass the layer's input [B, T, D] first or by name.
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _check_batch(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Any: as above.
    batch_size = len(_layer_input(args, kwargs))
    if batch_size != 1:
        raise UnsupportedBatch(batch_size=batch_size)

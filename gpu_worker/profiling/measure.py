"""Measuring: a loaded model's stages at the lengths in use on its device, and the machine's bandwidths.

One layer of each sort is projected, embedded and run, by the same code that restores. Bandwidths are those
from memory to the device, and from a file to memory past the page cache. Worst case: some seconds per length,
and a busy machine, whose profile is that of a busy machine; drift corrects it. A file system without direct
reads has the bandwidth of its cache.
"""

import mmap
import os
import platform
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import DELTAS
from gpu_worker.families import Adapter
from gpu_worker.families.model_shape import model_shape, representatives
from gpu_worker.forms.rows import pack
from gpu_worker.model.proof import adapt
from gpu_worker.pipeline.compute import Restorer, recompute_layers
from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.plan import Method, Stage
from gpu_worker.planning.profile import Curve, Link, Profile
from gpu_worker.planning.shape import LayerShape, ModelShape
from gpu_worker.profiling.profile_file import Measured


def hardware_name(device: torch.device) -> str:
    """Name what computes: the GPU, or the CPU with the number of threads that it uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    cpu = model[1].strip() if model else platform.processor() or platform.machine()
    return f"{cpu}, {min(torch.get_num_threads(), os.cpu_count() or 1)} threads"


@dataclass(frozen=True, slots=True)
# One call on a GPU:    synchronize ─ t0 ─ call (launches) ─ synchronize ─ t1
# Without the first, work of before would be counted; without the second, launching alone would.
class Stopwatch:
    """Times calls on one device: what they started there has ended when the time is taken."""

    device: torch.device
    repeat_count: int = 3
    now_ns: Callable[[], int] = time.perf_counter_ns

    def seconds(self, call: Callable[[], object]) -> list[float]:
        """Call once to warm up, then `repeat_count` times; seconds of each."""
        # The first call compiles kernels, fills caches and allocates: it is none of what is measured.
        call()
        return [self.once(call) for _ in range(self.repeat_count)]

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call, at least a nanosecond."""
        begin_ns = self.at_ns()
        call()
        return max(self.at_ns() - begin_ns, 1) / 1e9

    def at_ns(self) -> int:
        """The time, once the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.now_ns()


TRANSFER_BYTES = 64 << 20
"""More than caches hold."""
_READ_PIECE_BYTES = 1 << 20


def copy_bytes_per_s(
    device: torch.device, stopwatch: Stopwatch, *, size_bytes: int = TRANSFER_BYTES
) -> float:
    """Measure copying from memory onto `device`; from pinned memory where it is a GPU."""
    # The source is written first: pages that were never touched are one page of zeros, copied from the cache.
    source = torch.ones(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    target = torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return size_bytes / median(stopwatch.seconds(copy))


def read_bytes_per_s(directory: Path, stopwatch: Stopwatch, *, size_bytes: int = TRANSFER_BYTES) -> float:
    """Measure reading a file of `directory`, which is written first and removed after. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".ctxcache-profile-") as file:
        # Random bytes: some devices and file systems store compressible ones without writing them.
        file.write(os.urandom(_READ_PIECE_BYTES) * (size_bytes // _READ_PIECE_BYTES))
        file.flush()
        # Direct reads of pages that are dirty would wait for their write.
        os.fsync(file.fileno())
        fd = _open_direct(file.name)
        try:
            return size_bytes / median(stopwatch.seconds(_reader(fd, size_bytes)))
        finally:
            os.close(fd)


def _open_direct(path: str) -> int:
    try:
        # Some file systems refuse O_DIRECT, such as tmpfs before Linux 6.6.
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _reader(fd: int, size_bytes: int) -> Callable[[], None]:
    # Direct reads ask for aligned memory, which mmap's is.
    buffer = mmap.mmap(-1, _READ_PIECE_BYTES)

    def read() -> None:
        for offset in range(0, size_bytes, _READ_PIECE_BYTES):
            os.preadv(fd, [buffer], offset)

    return read


LENGTHS = (1, 64, 256, 1024, 2048)
"""Starts at one token: below its first length a profile is level, which would look like drift."""
Points = dict[tuple[Stage, LayerShape], list[tuple[int, float]]]
"""(tokens, seconds) of each stage and sort of layer."""


def measure(
    adapter: Adapter,
    *,
    name: str,
    hardware: str,
    lengths: Sequence[int] = LENGTHS,
    ssd_directory: Path | None = None,
    transfer_bytes: int = TRANSFER_BYTES,
    stopwatch: Stopwatch | None = None,
    on_step: Callable[[str], None] = lambda _step: None,
) -> Measured:
    """Measure `adapter`'s model at `lengths` tokens, ascending.

    Where there is no `ssd_directory`, SSDs are those of the datasheet. Raises what restoring raises, OSError.
    """
    watch = stopwatch or Stopwatch(adapter.layers[0].device)
    shape = model_shape(adapter, name)
    points: Points = defaultdict(list)
    with torch.no_grad():
        for length in lengths:
            on_step(f"{length:,} tokens")
            _add_restored(points, adapter, shape, length, watch)
            for layer, seconds in _recomputed(adapter, shape.layers, length, watch).items():
                points[Stage.RECOMPUTE, layer].append((length, seconds))
    on_step("bandwidths")
    return _measured(shape, points, hardware, watch, ssd_directory, transfer_bytes)


def measure_directory(
    directory: Path,
    *,
    name: str,
    dtype: str,
    device: str,
    lengths: Sequence[int],
    repeats: int,
    ssd_directory: Path | None = None,
    on_step: Callable[[str], None] = lambda _step: None,
) -> Measured:
    """As `measure`, for a transformers model's directory, loaded onto `device`. Raises InvalidArgument."""
    try:
        target = torch.device(device)
        loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        # The class's own `to` is wrapped in a way that type checkers cannot follow.
        nn.Module.to(loaded, target)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        problem = f"{directory} cannot be used: {' '.join(str(error).split())}"
        raise InvalidArgument(field="model", problem=problem) from error
    return measure(
        adapt(loaded),
        name=name,
        hardware=hardware_name(target),
        lengths=lengths,
        ssd_directory=ssd_directory,
        stopwatch=Stopwatch(target, repeats),
        on_step=on_step,
    )


def measure_restoring(
    adapter: Adapter,
    shape: ModelShape,
    *,
    hardware: str,
    lengths: Sequence[int],
    transfer_bytes: int = TRANSFER_BYTES,
    stopwatch: Stopwatch | None = None,
) -> Measured:
    """As `measure`, for a model that is not there as a whole: recomputation keeps the datasheet's times."""
    watch = stopwatch or Stopwatch(adapter.layers[0].device)
    points: Points = defaultdict(list)
    with torch.no_grad():
        for length in lengths:
            _add_restored(points, adapter, shape, length, watch)
    return _measured(shape, points, hardware, watch, None, transfer_bytes)


def _add_restored(points: Points, adapter: Adapter, shape: ModelShape, length: int, watch: Stopwatch) -> None:
    for layer, index in representatives(shape).items():
        for stage, seconds in _restored(adapter, layer, index, length, watch).items():
            points[stage, layer].append((length, seconds))


def _measured(
    shape: ModelShape,
    points: Points,
    hardware: str,
    watch: Stopwatch,
    ssd_directory: Path | None,
    transfer_bytes: int,
) -> Measured:
    profile = replace(
        _machine(hardware, watch, ssd_directory, transfer_bytes),
        curves={key: Curve(_ascending(each)) for key, each in points.items()},
    )
    return Measured(shape, profile)


def _machine(hardware: str, watch: Stopwatch, ssd_directory: Path | None, size_bytes: int) -> Profile:
    # Rates that are not measured, such as a network's, stay those of the nearest machine's datasheet.
    base = known_profile("h100" if watch.device.type == "cuda" else "cpu")
    copy = Link(copy_bytes_per_s(watch.device, watch, size_bytes=size_bytes), base.copy.latency_s)
    ssd = base.ssd
    if ssd_directory is not None:
        # The rate is measured, the latency is the datasheet's: one transfer of 64 MiB does not show it.
        ssd = Link(read_bytes_per_s(ssd_directory, watch, size_bytes=size_bytes), ssd.latency_s)
    return replace(base, name=hardware, copy=copy, ssd=ssd, is_direct=False, is_measured=True)


def _restored(
    adapter: Adapter, shape: LayerShape, layer: int, length: int, watch: Stopwatch
) -> dict[Stage, float]:
    """Seconds from rows of each kind, packed ones made wide first, to keys and values."""
    device, dtype = adapter.layers[layer].device, adapter.model.dtype
    restorer = Restorer(adapter, torch.arange(length))
    by_stage = {}
    for kind in shape.kinds:
        method, size = Method[kind.name], adapter.element_count(kind, layer)
        # Deltas take the stage of 4 bits: what they add is one addition.
        if size is None or kind in DELTAS:
            continue
        # Values do not change the time; ones pack into few bits without a refusal.
        example = torch.ones(length, size, dtype=dtype, device=device)
        if not method.is_exact:
            example = pack(example, kind)
        restore: Callable[[], object] = partial(restorer.layer, layer, method, example)
        if adapter.layers[layer].recurrence is not None:
            restore = partial(_state, adapter, layer, method, example)
        by_stage[Stage.of(method)] = median(watch.seconds(restore))
    return by_stage


def _state(adapter: Adapter, layer: int, method: Method, rows: Tensor) -> None:
    cache = DynamicCache(config=adapter.model.config)
    restorer = Restorer(adapter, torch.arange(len(rows)))
    restorer.advance(layer, method, rows, cache)
    if adapter.layers[layer].has_rows:
        restorer.layer(layer, method, rows)


def _recomputed(
    adapter: Adapter, layers: Sequence[LayerShape], length: int, watch: Stopwatch
) -> dict[LayerShape, float]:
    """Seconds of each sort of layer in a pass over `length` tokens: a median over layers and repeats."""
    ids, positions = torch.zeros(length, dtype=torch.int64), torch.arange(length)
    taken: dict[LayerShape, list[float]] = defaultdict(list)
    for repeat in range(watch.repeat_count + 1):
        # A clock waits for the device at each layer: their sum is more than a pass without clocks.
        clocks = [_LayerClock(decoder.block, watch) for decoder in adapter.layers]
        try:
            recompute_layers(adapter, DynamicCache(config=adapter.model.config), ids, positions, len(layers))
        finally:
            for clock in clocks:
                clock.remove()
        # The first pass warms up.
        if repeat:
            for layer, clock in zip(layers, clocks, strict=True):
                taken[layer].append(clock.seconds)
    return {layer: median(seconds) for layer, seconds in taken.items()}


class _LayerClock:
    """Sums up the seconds that one layer runs, piece by piece."""

    def __init__(self, block: nn.Module, watch: Stopwatch) -> None:
        self._watch, self._begin_ns, self.seconds = watch, 0, 0.0
        self._hooks = [block.register_forward_pre_hook(self._begin), block.register_forward_hook(self._end)]

    def _begin(self, _block: nn.Module, _args: object) -> None:
        self._begin_ns = self._watch.at_ns()

    def _end(self, _block: nn.Module, _args: object, _output: Tensor) -> None:
        self.seconds += max(self._watch.at_ns() - self._begin_ns, 1) / 1e9

    def remove(self) -> None:
        """Take the clock off the layer."""
        for hook in self._hooks:
            hook.remove()


def _ascending(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The points with no time below that of fewer tokens: noise must not make more work look cheaper."""
    least = 0.0
    ascending = []
    for length, seconds in points:
        least = max(least, seconds)
        ascending.append((length, least))
    return tuple(ascending)

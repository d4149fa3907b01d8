"""Baselines: what the papers, and what no planner at all, would do with the same layers.

For layers that are not alike, the formulas get the average layer. Worst case: a baseline that the
store or the engine does not allow, which is left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from gpu_worker.plan import Method
from gpu_worker.planning.assignment import Assignment
from gpu_worker.planning.closed_forms import (
    LayerTimes,
    Schedule,
    hcache_schedule,
    kvpr_split,
    naive_hybrid_schedule,
)
from gpu_worker.planning.option import LayerOptions, Option

RECOMPUTE, KV, HIDDEN = "recompute", "kv", "hidden"
NAIVE_HYBRID, HCACHE, KVPR = "naive hybrid", "hcache", "kvpr"

SplitAt = Callable[[int, int], Option | None]
"""(layer, tokens from hidden rows) -> the layer split there."""


def baselines(
    layers: Sequence[LayerOptions], history: int, split_at: SplitAt | None
) -> Mapping[str, Assignment]:
    """Return the assignments by name; `split_at` is None where the engine does not split layers."""
    found = {
        RECOMPUTE: _assignment(layers, Schedule(len(layers), 0, 0)),
        KV: _assignment(layers, Schedule(0, 0, len(layers))),
        HIDDEN: _assignment(layers, Schedule(0, len(layers), 0)),
    }
    times = _times(layers)
    if times is not None and found[RECOMPUTE]:
        found[NAIVE_HYBRID] = _assignment(layers, naive_hybrid_schedule(len(layers), times))
        found[HCACHE] = _assignment(layers, hcache_schedule(len(layers), times))
    found[KVPR] = split_everywhere(layers, history, split_at)
    return {name: assignment for name, assignment in found.items() if assignment is not None}


def _assignment(layers: Sequence[LayerOptions], schedule: Schedule) -> Assignment | None:
    if any(layer.recompute is None for layer in layers[: schedule.recomputed]):
        return None
    methods = [Method.HIDDEN] * schedule.hidden + [Method.KV] * schedule.kv
    options = [
        _option(layer, method) for layer, method in zip(layers[schedule.recomputed :], methods, strict=True)
    ]
    return Assignment(schedule.recomputed, tuple(_all(options))) if all(options) else None


def _option(layer: LayerOptions, method: Method) -> Option | None:
    """The option by that method, rows of any kind counting as K/V; whatever there is where it is the only one."""
    by_method = {option.method: option for option in layer.options}
    is_hidden = method is Method.HIDDEN
    fitting = (each for of, each in by_method.items() if of and (of.unpacked is Method.HIDDEN) == is_hidden)
    return next(
        fitting, layer.options[0] if len(layer.options) == 1 and not layer.options[0].method else None
    )


def _all(options: Sequence[Option | None]) -> Iterator[Option]:
    return (option for option in options if option is not None)


def _times(layers: Sequence[LayerOptions]) -> LayerTimes | None:
    """The average layer, where all hold both kinds; reading and copying count as one stream."""
    pairs = [(_option(layer, Method.HIDDEN), _option(layer, Method.KV)) for layer in layers]
    both = [(hidden.pieces[0], rows.pieces[0]) for hidden, rows in pairs if hidden and rows]
    if len(both) < len(layers):
        return None
    return LayerTimes(
        hidden_io_s=fmean(max(hidden.read_s, hidden.copy_s) for hidden, _ in both),
        kv_io_s=fmean(max(rows.read_s, rows.copy_s) for _, rows in both),
        hidden_compute_s=fmean(hidden.compute_s for hidden, _ in both),
        token_compute_s=fmean(layer.recompute.compute_s if layer.recompute else 0.0 for layer in layers),
    )


def split_everywhere(
    layers: Sequence[LayerOptions], history: int, split_at: SplitAt | None
) -> Assignment | None:
    """Return every layer split at KVPR's token; None where that cannot be."""
    times = _times(layers) if split_at is not None and history else None
    if split_at is None or times is None:
        return None
    split = kvpr_split(
        history,
        activation_s=times.hidden_io_s / history,
        recompute_s=times.hidden_compute_s / history,
        kv_s=times.kv_io_s / history,
    )
    options = [split_at(layer, split) for layer in range(len(layers))]
    return Assignment(0, tuple(_all(options))) if all(options) else None

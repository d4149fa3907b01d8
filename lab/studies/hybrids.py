"""Hybrids at any token: states rebuilt from layer inputs, compared to a full prefill, and what that computes.

    .venv/bin/python -m lab.studies.hybrids                # five architectures, 100 counts each
    .venv/bin/python -m lab.studies.hybrids --counts 10 --only lfm2

Random models on a CPU, in float32, tokens captured once. At each random count all layers come back from
their inputs in pieces of random lengths. The next logits are compared to those of a full prefill, as a
difference over the largest logit; the control leaves one token out. FLOPs are matrix products as torch counts
them, of the restore and of the prefill of the same tokens. Wrong boundaries: pieces that do not begin where a
state stands; the control takes the check away and sees logits that differ. Exits with 1 if a bound is missed.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache, DynamicCache, PreTrainedModel

from ctxcache.format.streams import StateKind, Stream
from gpu_worker.capture import Capture
from gpu_worker.errors import IncompleteRestore
from gpu_worker.families import Adapter
from gpu_worker.generation import prefill
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.plan import Method
from gpu_worker.proof import adapt
from lab.studies.families import VOCABULARY, build

NAMES = ("qwen3_next", "mamba2", "falcon_h1", "jamba", "lfm2")
LENGTH = 200
NEXT = (5, 3, 8)
SLOW = -3.0
"""Logarithm of how fast states decay: by about 3 % a token. Random ones forget within five."""
BOUND, SEEN = 1e-5, 1e-3
"""The largest difference of a restored session, and the least that a wrong one has to show."""


@dataclass(slots=True)
class Found:
    """The outcome of one architecture."""

    worst: float = 0.0
    equal: int = 0
    least_wrong: float = float("inf")
    restore_flops: int = 0
    prefill_flops: int = 0
    attempts: int = 0
    accepted: int = 0
    unchecked: list[float] = field(default_factory=list)
    """Differences where the check of boundaries is taken away."""


def remembering(name: str) -> PreTrainedModel:
    """A random model whose states keep tokens for long, and so count for its logits."""
    model = build(name, torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.fill_(SLOW)
            elif parameter.ndim > 1 and "emb" not in key:
                parameter.mul_(0.6)
    return model


class Session:
    """One model's tokens, and the inputs of its layers."""

    def __init__(self, adapter: Adapter, seed: int) -> None:
        self.adapter = adapter
        self.ids = random.Random(seed).choices(range(VOCABULARY), k=LENGTH)  # noqa: S311
        pieces: list[list[Tensor]] = [[] for _ in adapter.layers]
        streams = [Stream(layer, StateKind.HIDDEN) for layer in range(len(pieces))]
        with Capture(adapter, streams, lambda layer, _, rows: pieces[layer].append(rows.clone())):
            self.passing(self.empty(), self.ids)
        self.rows = [torch.cat(some) for some in pieces]

    def empty(self) -> DynamicCache:
        """A cache that has taken nothing in."""
        return DynamicCache(config=self.adapter.model.config)

    def passing(self, cache: Cache, ids: Sequence[int]) -> Tensor:
        """Logits behind the last of some tokens."""
        return prefill(self.adapter.model, cache, ids, is_stepwise=self.adapter.is_stepwise)

    def restored(self, count: int, cuts: Sequence[tuple[int, int]], *, is_checked: bool = True) -> Cache:
        """The first tokens out of rows, in pieces [begin, end)."""
        target, modules = CacheTarget(self.adapter, count), Modules(self.adapter, torch.arange(count))
        for layer, rows in enumerate(self.rows):
            for begin, end in cuts:
                if not is_checked:
                    modules.restorer._advanced[layer] = begin  # noqa: SLF001  the control
                data = rows[begin:end].contiguous().view(torch.uint8)
                modules.restore(layer, Method.HIDDEN, data, begin, target.room(layer, begin, end))
            target.finish(layer)
        return target.cache


def measured(name: str, counts: int, attempts: int) -> Found:
    """Run one architecture."""
    session, found = Session(adapt(remembering(name)), 3), Found()
    dice = random.Random(name)  # noqa: S311
    for _ in range(counts):
        count = dice.randrange(3, LENGTH)
        expected = prefill(session.adapter.model, session.empty(), [*session.ids[:count], *NEXT])
        cache = session.restored(count, _pieces(dice, count))
        distance = _distance(session.passing(cache, NEXT), expected)
        wrong = session.restored(count - 1, [(0, count - 1)])
        found.worst, found.equal = max(found.worst, distance), found.equal + (distance <= BOUND)
        found.least_wrong = min(found.least_wrong, _distance(session.passing(wrong, NEXT), expected))
    with FlopCounterMode(display=False) as counter:
        session.restored(LENGTH, [(0, LENGTH)])
    found.restore_flops = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        prefill(session.adapter.model, session.empty(), session.ids)
    found.prefill_flops = counter.get_total_flops()
    for attempt in range(attempts):
        cuts = _wrong(dice)
        found.attempts += 1
        with suppress(IncompleteRestore):
            session.restored(LENGTH, cuts)
            found.accepted += 1
        if attempt % 500 == 0:
            # A gap close to the end: a short convolution forgets what is far back.
            end = dice.randrange(LENGTH - 16, LENGTH - 1)
            begin = dice.randrange(max(end, LENGTH - 3) + 1, LENGTH)
            cache = session.restored(LENGTH, [(0, end), (begin, LENGTH)], is_checked=False)
            expected = prefill(session.adapter.model, session.empty(), [*session.ids, *NEXT])
            found.unchecked.append(_distance(session.passing(cache, NEXT), expected))
    return found


def _pieces(dice: random.Random, count: int) -> list[tuple[int, int]]:
    cuts = sorted({0, count, dice.randrange(1, count), dice.randrange(1, count)})
    return list(pairwise(cuts))


def _wrong(dice: random.Random) -> list[tuple[int, int]]:
    """Two pieces of which the second does not begin where the first ends; sometimes the first is missing."""
    end = dice.randrange(1, LENGTH - 1)
    begin = dice.choice([other for other in range(LENGTH) if other != end])
    return [(begin, LENGTH)] if begin and dice.random() < 0.25 else [(0, end), (begin, LENGTH)]


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="architectures, with commas between")
    parser.add_argument("--counts", type=int, default=100)
    parser.add_argument("--attempts", type=int, default=2000, help="wrong boundaries of each architecture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| architecture | equal | worst | a token less | restore/prefill FLOPs | wrong accepted | unchecked |"
    )
    print("|---|---|---|---|---|---|---|")
    is_good, attempts, accepted = True, 0, 0
    for name in options.only.split(",") if options.only else NAMES:
        found = measured(name, options.counts, options.attempts)
        attempts, accepted = attempts + found.attempts, accepted + found.accepted
        is_good &= found.equal == options.counts and found.least_wrong > SEEN and not found.accepted
        is_good &= all(distance > SEEN for distance in found.unchecked)
        print(
            f"| {name} | {found.equal} of {options.counts} | {found.worst:.0e} | {found.least_wrong:.0e} "
            f"| {found.restore_flops / found.prefill_flops:.2f} | {found.accepted} of {found.attempts} "
            f"| {min(found.unchecked, default=0.0):.0e} |",
            flush=True,
        )
    print(f"\n{attempts} attempts at a wrong boundary, {accepted} accepted.")
    return not is_good


if __name__ == "__main__":
    sys.exit(main())

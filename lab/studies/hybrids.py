"""Hybrids at any token: states from snapshots and layer inputs, compared to a full prefill, and their FLOPs.

    .venv/bin/python -m lab.studies.hybrids                # five architectures, 100 counts each
    .venv/bin/python -m lab.studies.hybrids --counts 10 --only lfm2

Random models on a CPU, in float32, tokens captured once, snapshots of states taken as often as the planner
says. At each random count all layers come back twice: from inputs alone in pieces of random lengths, and from
the last snapshot, through its bytes, with the inputs behind it. The next logits are compared to those of a
full prefill, as a difference over the largest logit; the control leaves one token out. FLOPs are matrix
products as torch counts them, of all restores over all prefills of the same tokens.

Wrong boundaries: pieces that do not begin where a state stands; snapshots of another count, other tokens,
another layer or another model; rows that do not begin where the snapshot stands. The controls take the checks
away and see logits that differ. Exits with 1 if a bound is missed.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache, DynamicCache, PreTrainedModel

from ctxcache.format.streams import StateKind, Stream
from gpu_worker.errors import IncompleteRestore, SnapshotMismatch
from gpu_worker.families import Adapter
from gpu_worker.families.generation import Capture, prefill
from gpu_worker.families.model_shape import model_shape
from gpu_worker.forms.snapshots import Bytes, Snapshot, decoded, encoded, identities, states_of
from gpu_worker.model.proof import adapt
from gpu_worker.pipeline.compute import Modules, Restorer
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.layout import Return, snapshot_every
from gpu_worker.planning.plan import Method
from lab.studies.families import VOCABULARY, build

NAMES = ("qwen3_next", "mamba2", "falcon_h1", "jamba", "lfm2")
LENGTH = 200
NEXT = (5, 3, 8)
SLOW = -3.0
"""Logarithm of how fast states decay: by about 3 % a token. Random ones forget within five."""
FINGERPRINT = bytes(32)
FLOPS_SHARE = 0.25
"""The most that restores may compute, of what prefills of the same tokens do."""
BOUND, SEEN = 1e-5, 1e-3
"""The largest difference of a restored session, and the least that a wrong one has to show."""


@dataclass(slots=True)
class Found:
    """The outcome of one architecture."""

    worst: float = 0.0
    equal: int = 0
    least_wrong: float = float("inf")
    every: int = 0
    """Tokens between snapshots."""
    rows_flops: int = 0
    snapshot_flops: int = 0
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

    def __init__(self, adapter: Adapter, seed: int, every: int) -> None:
        self.adapter, self.every = adapter, every
        self.ids = random.Random(seed).choices(range(VOCABULARY), k=LENGTH)  # noqa: S311
        pieces: list[list[Tensor]] = [[] for _ in adapter.layers]
        streams = [Stream(layer, StateKind.HIDDEN) for layer in range(len(pieces))]
        counts = range(every, LENGTH, every)
        self.identities = {one.token_count: one for one in identities(FINGERPRINT, self.ids, counts)}
        self.blocks: dict[int, dict[int, Bytes]] = {}
        with Capture(adapter, streams, lambda layer, _, rows: pieces[layer].append(rows.clone())):
            self.passing(self.empty(), self.ids)
        self.rows = [torch.cat(some) for some in pieces]
        # As an engine takes them: in passes that end there.
        cache = self.empty()
        for count in counts:
            self.passing(cache, self.ids[count - every : count])
            self.blocks[count] = {
                layer: encoded(self.identities[count], layer, states_of(cache, layer))
                for layer in adapter.state_layers
            }

    def snapshot(self, count: int) -> Snapshot | None:
        """The last one before so many tokens, out of its bytes."""
        at = count // self.every * self.every
        if at not in self.blocks:
            return None
        found = {
            layer: decoded(self.identities[at], layer, block) for layer, block in self.blocks[at].items()
        }
        return Snapshot(at, found)

    def empty(self) -> DynamicCache:
        """A cache that has taken nothing in."""
        return DynamicCache(config=self.adapter.model.config)

    def passing(self, cache: Cache, ids: Sequence[int]) -> Tensor:
        """Logits behind the last of some tokens."""
        return prefill(self.adapter.model, cache, ids, is_stepwise=self.adapter.is_stepwise)

    def restored(
        self,
        count: int,
        cuts: Sequence[tuple[int, int]],
        *,
        is_checked: bool = True,
        snapshot: Snapshot | None = None,
    ) -> Cache:
        """The first tokens out of rows, in pieces [begin, end); by default those behind the snapshot."""
        target = CacheTarget(self.adapter, count, snapshot=snapshot)
        modules = Modules(self.adapter, torch.arange(count), standing=target.standing)
        for layer, rows in enumerate(self.rows):
            first = target.first_token(layer)
            for begin, end in cuts or [(first, count)] * (first < count):
                if not is_checked:
                    modules.restorer._advanced[layer] = begin  # noqa: SLF001  the control
                data = rows[begin:end].contiguous().view(torch.uint8)
                modules.restore(layer, Method.HIDDEN, data, begin, target.room(layer, begin, end))
            target.finish(layer)
        return target.cache


def measured(name: str, counts: int, attempts: int) -> Found:
    """Run one architecture."""
    adapter = adapt(remembering(name))
    every = snapshot_every(model_shape(adapter, name), known_profile("cpu"), [Return(LENGTH, count=counts)])
    session, found = Session(adapter, 3, every), Found(every=every)
    dice = random.Random(name)  # noqa: S311
    for _ in range(counts):
        count = dice.randrange(3, LENGTH)
        expected = prefill(adapter.model, session.empty(), [*session.ids[:count], *NEXT])
        from_rows = session.restored(count, _pieces(dice, count))
        with FlopCounterMode(display=False) as rows_flops:
            session.restored(count, [])
        snapshot = session.snapshot(count)
        with FlopCounterMode(display=False) as snapshot_flops:
            from_snapshot = session.restored(count, [], snapshot=snapshot)
        with FlopCounterMode(display=False) as prefill_flops:
            prefill(adapter.model, session.empty(), session.ids[:count])
        found.rows_flops += rows_flops.get_total_flops()
        found.snapshot_flops += snapshot_flops.get_total_flops()
        found.prefill_flops += prefill_flops.get_total_flops()
        distance = max(
            _distance(session.passing(cache, NEXT), expected) for cache in (from_rows, from_snapshot)
        )
        wrong = session.restored(count - 1, [(0, count - 1)])
        found.worst, found.equal = max(found.worst, distance), found.equal + (distance <= BOUND)
        found.least_wrong = min(found.least_wrong, _distance(session.passing(wrong, NEXT), expected))
    expected = prefill(adapter.model, session.empty(), [*session.ids, *NEXT])
    for attempt in range(attempts):
        found.attempts += 1
        with suppress(IncompleteRestore, SnapshotMismatch):
            if attempt % 2:
                session.restored(LENGTH, _wrong(dice))
            else:
                _wrong_snapshot(session, dice)
            found.accepted += 1
        if attempt % 500 == 0:
            found.unchecked += [
                _distance(session.passing(one, NEXT), expected) for one in _unchecked(session, dice)
            ]
    return found


def _unchecked(session: Session, dice: random.Random) -> Iterator[Cache]:
    """Caches of wrong boundaries, with no check in the way."""
    # A gap close to the end: a short convolution forgets what is far back.
    end = dice.randrange(LENGTH - 16, LENGTH - 1)
    begin = dice.randrange(max(end, LENGTH - 3) + 1, LENGTH)
    yield session.restored(LENGTH, [(0, end), (begin, LENGTH)], is_checked=False)
    # A snapshot of fewer tokens passed off as one of all but the last: its count is forged.
    last = session.snapshot(LENGTH)
    if last is not None:
        yield session.restored(LENGTH, [], snapshot=replace(last, token_count=LENGTH - 1))


def _wrong_snapshot(session: Session, dice: random.Random) -> None:
    """Restore from a snapshot that is not the one asked for, or by rows that do not begin where it stands."""
    counts = list(session.blocks)
    at = dice.choice(counts)
    layer = dice.choice(session.adapter.state_layers)
    identity, block = session.identities[at], session.blocks[at][layer]
    way = dice.randrange(5)
    if way == 0:
        # Another count of the same tokens.
        other = dice.choice([count for count in range(1, LENGTH) if count != at])
        (wanted,) = identities(FINGERPRINT, session.ids, [other])
        decoded(wanted, layer, block)
    elif way == 1:
        # Other tokens, as many.
        ids = list(session.ids[:at])
        ids[dice.randrange(at)] ^= 1
        (wanted,) = identities(FINGERPRINT, ids, [at])
        decoded(wanted, layer, block)
    elif way == 2:
        # Another layer, or another model.
        if dice.random() < 0.5:
            decoded(identity, dice.choice([other for other in range(64) if other != layer]), block)
        else:
            decoded(replace(identity, fingerprint=dice.randbytes(32)), layer, block)
    elif way == 3:
        # More tokens than the session has.
        states = decoded(identity, layer, block)
        CacheTarget(session.adapter, dice.randrange(1, at), snapshot=Snapshot(at, {layer: states}))
    else:
        # Rows before it, or a gap behind it.
        states = decoded(identity, layer, block)
        begin = dice.choice([other for other in range(LENGTH) if other != at])
        target = CacheTarget(session.adapter, LENGTH, snapshot=Snapshot(at, {layer: states}))
        restorer = Restorer(session.adapter, torch.arange(LENGTH), standing=target.standing)
        restorer.advance(layer, Method.HIDDEN, session.rows[layer][begin:], target.cache, begin=begin)


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
        "| architecture | equal | worst | a token less | FLOPs: rows | snapshot every | wrong | unchecked |"
    )
    print("|---|---|---|---|---|---|---|---|")
    is_good, attempts, accepted = True, 0, 0
    for name in options.only.split(",") if options.only else NAMES:
        found = measured(name, options.counts, options.attempts)
        attempts, accepted = attempts + found.attempts, accepted + found.accepted
        is_good &= found.equal == options.counts and found.least_wrong > SEEN and not found.accepted
        is_good &= all(distance > SEEN for distance in found.unchecked)
        is_good &= found.snapshot_flops <= FLOPS_SHARE * found.prefill_flops
        print(
            f"| {name} | {found.equal} of {options.counts} | {found.worst:.0e} | {found.least_wrong:.0e} "
            f"| {found.rows_flops / found.prefill_flops:.2f} "
            f"| {found.every}: {found.snapshot_flops / found.prefill_flops:.2f} "
            f"| {found.accepted} of {found.attempts} "
            f"| {min(found.unchecked, default=0.0):.0e} |",
            flush=True,
        )
    print(f"\n{attempts} attempts at a wrong boundary, {accepted} accepted.")
    return not is_good


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Whether it pays to keep the first layers of many sessions in DRAM, and not all layers of few.

lab/notes/partial_residency.md has the answer.

`python -m lab.studies.partial_residency` prints what share of a session must be in DRAM for no added latency;
with `--traces DIR` it replays the traces of that directory, too, and prints a line of JSON for each replay.
Where a prefill is long beside the read, hardly any layer is needed; see `ctxcache.simulate.store`.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ctxcache.core.placement.served import RANKED
from ctxcache.simulate.load import Load
from ctxcache.simulate.replay import Replay
from ctxcache.simulate.rows import TraceTurn
from ctxcache.simulate.store import Layers, MakePolicy
from ctxcache.simulate.study import BOUNDLESS_BYTES, footprint_bytes, look
from ctxcache.simulate.trace import Trace

HISTORIES = (1024, 2048, 4096, 8192, 16_384)
INPUTS = (26, 100, 500)
READ_GB_PER_S = (5, 20)
COPY_BYTES_PER_S = 26e9
RESIDENT_SHARES = (1.0, 0.5, 0.25)
FIGURES = (
    "later_turns",
    "dram_hit_rate",
    "prefetches",
    "later_ttft_mean_s",
    "later_ttft_p95_s",
    "ttft_mean_s",
    "ttft_p95_s",
)
TRACES = {"mooncake": "mooncake_conv_sessions_A.csv.gz", "sharegpt-ca": "sharegptlike_ca_A.csv.gz"}


@dataclass(frozen=True, slots=True)
class Model:
    """Bytes of state a token, layers, and tokens a second of prefill."""

    name: str
    token_bytes: int
    layer_count: int
    prefill_tokens_per_s: float


MODELS = (Model("llama-13b", 819_200, 40, 7_000.0), Model("llama-3-8b", 131_072, 32, 12_800.0))


REPLAYED = ((MODELS[0], 20), (MODELS[1], 5))
"""At 5 GB/s the larger model's turns wait minutes for SSD, whatever is in DRAM.

At 20 GB/s the smaller one's do not wait.
"""


def needed_share(model: Model, history: int, new: int, read_bytes_per_s: float) -> float:
    """Share of its layers that a session needs in DRAM for a first token as early as with all of them."""
    size_bytes = history * model.token_bytes
    copy_s, prefill_s = size_bytes / COPY_BYTES_PER_S, new / model.prefill_tokens_per_s
    layers = Layers(model.layer_count, model.layer_count, copy_s, prefill_s)
    return layers.hidden(size_bytes / read_bytes_per_s) / model.layer_count


def print_needed() -> None:
    """The table, in Markdown: per cent, one column per length of history."""
    print("| model | SSD | new tokens |" + "".join(f" {history // 1024}K |" for history in HISTORIES))
    print("|---|---|---|" + "---|" * len(HISTORIES))
    for model, gb_per_s, new in itertools.product(MODELS, READ_GB_PER_S, INPUTS):
        shares = (needed_share(model, history, new, gb_per_s * 1e9) for history in HISTORIES)
        print(f"| {model.name} | {gb_per_s} GB/s | {new} |" + "".join(f" {share:.0%} |" for share in shares))


class Beginning:
    """The first turns of a trace, every time it is read."""

    def __init__(self, trace: Trace, count: int | None) -> None:
        self._trace, self._count = trace, count

    def __iter__(self) -> Iterator[TraceTurn]:
        return itertools.islice(self._trace, self._count)


def maker(policy: str) -> MakePolicy:
    """The policy by that name."""
    return lambda capacities, _: RANKED[policy](capacities)


def replays(
    name: str, trace: Beginning, slot_count: int | None, dram_share: float
) -> Iterator[dict[str, object]]:
    """Every model, policy and share; SSD has room for all, DRAM for a share of the live footprint."""
    usual = Load(
        slot_count=slot_count, is_timed=slot_count is None, is_inclusive=True, ssd_bytes=BOUNDLESS_BYTES
    )
    next_arrivals_s = look(trace)
    for model, gb_per_s in REPLAYED:
        load = replace(
            usual,
            token_bytes=model.token_bytes,
            prefill_tokens_per_s=model.prefill_tokens_per_s,
            ssd_read_bytes_per_s=gb_per_s * 1e9,
            layer_count=model.layer_count,
        )
        live_bytes = footprint_bytes(trace, load, next_arrivals_s, lambda _what, _done: None)
        load = replace(load, dram_bytes=int(live_bytes * dram_share))
        for policy, share in itertools.product(("lru", "value"), RESIDENT_SHARES):
            partial = replace(load, resident_layer_count=round(model.layer_count * share))
            figures = Replay(partial, maker(policy)).run(trace).figures()
            yield {
                "trace": name,
                "slots": slot_count,
                "model": model.name,
                "ssd_gb_per_s": gb_per_s,
                "policy": policy,
                "dram_share": dram_share,
                "resident_share": share,
                "dram_bytes": load.dram_bytes,
                **{figure: figures[figure] for figure in FIGURES},
            }


def main() -> None:
    """Print the table, then replay what was named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="directory with the traces")
    parser.add_argument("--only", choices=TRACES, help="one of them")
    parser.add_argument("--turns", type=int, help="of each trace the first so many")
    parser.add_argument("--slots", type=int, help="turns wait in a queue for so many slots")
    parser.add_argument(
        "--dram-share", type=float, default=0.06, help="DRAM as a share of the live footprint"
    )
    arguments = parser.parse_args()
    if not arguments.traces:
        print_needed()
        return
    for name, file in TRACES.items():
        if arguments.only in (None, name):
            trace = Beginning(Trace(arguments.traces / file), arguments.turns)
            for row in replays(name, trace, arguments.slots, arguments.dram_share):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

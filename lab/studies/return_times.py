#!/usr/bin/env python3
"""Return times that a store begins with: what `value` learns from public traces, each weighing the same.

    python -m lab.studies.return_times DIRECTORY ctxcache/core/placement/return_times.json

DIRECTORY has the traces of TRACES. Mooncake's conversations are not among them: they judge the policy.
Of each trace the counts of sessions of which nothing was said are scaled so that together SESSION_COUNT
sessions came to rest: some hundred turns of the store's own load outweigh them.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.returns import AGES_S, IDLE
from ctxcache.core.placement.value import MissCost, Objective, ReturnValue
from ctxcache.simulate.blocks import BlockReplay
from ctxcache.simulate.load import Load
from ctxcache.simulate.study import Capacity, footprint_bytes, look
from ctxcache.simulate.trace import BLOCK_TOKENS, Trace

TRACES = {
    "agentic_cc_A.csv.gz": "callanjfox/kv-cache-tester, traces/, every second trace; Apache-2.0",
    "mooncake_synthetic_A.jsonl.gz": "kvcache-ai/Mooncake, FAST25-release/traces, synthetic; Apache-2.0",
}
SESSION_COUNT = 200.0
LEAST_COUNT = 0.5
"""A class of fewer sessions says nothing beside its parent class."""
NO_LESSONS = {"ages_s": list(AGES_S), "classes": {}, "wait_s": 0.0, "queued_share": 0.0}


def learned(path: Path) -> dict[str, list[list[float]]]:
    """Counts of one trace by name, as a store of the size of the live footprint sees it."""
    trace = list(Trace(path))
    load = Capacity(1.0).of(Load(), footprint_bytes(trace, Load(), look(trace), lambda _what, _done: None))
    cost = MissCost(Objective.TOKENS)
    policy = ReturnValue(Capacities(load.dram_bytes, load.ssd_bytes), cost, NO_LESSONS)
    BlockReplay(load, policy, BLOCK_TOKENS).run(trace)
    classes: dict[str, list[list[float]]] = policy.lessons()["classes"]  # type: ignore[assignment]
    return {name: counts for name, counts in classes.items() if name.split(".")[0] == str(IDLE)}


def main() -> None:
    """Write the counts of all traces."""
    together: dict[str, list[list[float]]] = defaultdict(lambda: [[0.0] * len(AGES_S), [0.0] * len(AGES_S)])
    for file in TRACES:
        classes = learned(Path(sys.argv[1]) / file)
        scale = SESSION_COUNT / len(TRACES) / classes[str(IDLE)][0][0]
        for name, (away, came) in classes.items():
            for counts, more in zip(together[name], (away, came), strict=True):
                counts[:] = [round(count + scale * each, 2) for count, each in zip(counts, more, strict=True)]
    told = sorted((name, counts) for name, counts in together.items() if max(counts[0]) >= LEAST_COUNT)
    lines = [f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in told]
    head = {"sources": list(TRACES.values()), "ages_s": AGES_S, "wait_s": 0.0, "queued_share": 0.0}
    text = json.dumps(head).removesuffix("}") + ',\n"classes": {\n' + ",\n".join(lines) + "\n}}\n"
    Path(sys.argv[2]).write_text(text)


if __name__ == "__main__":
    main()

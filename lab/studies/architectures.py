"""Every causal architecture of the installed transformers: which way serves it, or why it is refused.

    .venv/bin/python -m lab.studies.architectures                      # all, a table
    .venv/bin/python -m lab.studies.architectures --only rwkv,roformer
    .venv/bin/python -m lab.studies.architectures --write FILE.md

Each is a small random model, in a process of its own with a limit of time and of memory: an end by signal is
a line of the table like any other. What `adapt` serves holds a conversation of three turns on a real store,
and each turn's logits are compared to those of a cache that was never dropped (`families.py`).

    served      by the kinds of rows that the model proved
    refused     with the reason
    not built   no small random model could be made of it
    error       anything else: the command fails
"""

import logging
import multiprocessing
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import ctxcache
from ctxcache.format.streams import StateKind
from gpu_worker.errors import UnsupportedArchitecture, WeightsNotVisible
from gpu_worker.families import Adapter
from gpu_worker.families.generation import prefill
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.model.unchanged import Unchanged
from lab.bench.server import serving
from lab.studies.families import apart, build, configured, conversation, options_of

LIMIT_S = 120.0
MEMORY_BYTES = 24 << 30
"""Of addresses, most of which libraries reserve and do not use."""
MOST_PARAMETERS = 80_000_000
SERVED, REFUSED, NOT_BUILT, ERROR = "served", "refused", "not built", "error"
_BOUND = 1e-4
"""The largest difference over the largest logit in float32: sums of another order."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one architecture, and the kinds of rows or the reason."""

    name: str
    sort: str
    text: str


def tried(name: str, target: str) -> Outcome:
    """Build, prove and serve one architecture. Raises whatever the product lets out."""
    try:
        model = _made(name)
    except Exception as error:  # noqa: BLE001  transformers' own code, on settings that it was not made for
        return Outcome(name, NOT_BUILT, _line(error))
    try:
        adapter = adapt(model)
        _run_twice(adapter)
    except (UnsupportedArchitecture, WeightsNotVisible) as error:
        return Outcome(name, REFUSED, str(error).partition(": ")[2])
    cells = []
    with ctxcache.connect(target) as client:
        for kind in (*adapter.kinds, StateKind.TOKENS):
            found = conversation(adapter, kind, client, f"{name}-{kind.name.lower()}")
            cell = f"{kind.name.lower()} {found}"
            if found != "=" and not (found[0].isdigit() and float(found) <= _BOUND):
                # Recomputed rows differ at least as much as transformers' own passes differ from each other.
                own = apart(adapter) if kind is StateKind.TOKENS and found[0].isdigit() else 0.0
                if not own or own < float(found) / 2:
                    return Outcome(name, ERROR, cell)
                cell += f" (passes cut otherwise, without a store: {own:.0e})"
            cells.append(cell)
    return Outcome(name, SERVED, ", ".join(cells))


def _run_twice(adapter: Adapter) -> None:
    """Raise ModelChanged where passes leave marks on the model: each second turn would be refused."""
    model = adapter.model
    spec = model_spec(model, model_id="looked at")
    prefill(model, DynamicCache(config=model.config), [1, 2, 3])
    unchanged = Unchanged(model, spec)
    for _ in range(2):
        prefill(model, DynamicCache(config=model.config), [5, 3, 8, 1])
        unchanged.check()


def _made(name: str) -> PreTrainedModel:
    """A small random model; one without weights where some of it cannot be small (towers for pictures)."""
    with torch.device("meta"):
        bare: PreTrainedModel = AutoModelForCausalLM.from_config(configured(name))  # type: ignore[no-untyped-call]
    size = sum(parameter.numel() for parameter in bare.parameters())
    return build(name, torch.float32) if size <= MOST_PARAMETERS else bare


def _child(name: str, target: str, answers: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    try:
        answers.send(tried(name, target))
    except BaseException as error:  # noqa: BLE001  a line of the table, whatever it is
        answers.send(Outcome(name, ERROR, _line(error)))


def alone(name: str, target: str) -> Outcome:
    """The same in a process of its own, which may crash or hang."""
    # Forked: transformers is imported once, and no thread of this process holds a lock.
    context = multiprocessing.get_context("fork")
    answers, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, target, sending))
    process.start()
    sending.close()
    try:
        if not answers.poll(LIMIT_S):
            return Outcome(name, ERROR, f"not done after {LIMIT_S:.0f} s")
        return _received(answers)
    except EOFError:
        process.join()
        return Outcome(name, ERROR, f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _received(answers: Connection) -> Outcome:
    answer: Outcome = answers.recv()
    return answer


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def table(outcomes: Sequence[Outcome]) -> str:
    """All outcomes as Markdown, with their counts."""
    lines = []
    for sort in (SERVED, REFUSED, NOT_BUILT, ERROR):
        those = [outcome for outcome in outcomes if outcome.sort == sort]
        if those:
            lines += [f"| {sort} | {'by' if sort == SERVED else 'reason'} |", "|---|---|"]
            lines += [f"| {outcome.name} | {outcome.text.replace('|', '/')} |" for outcome in those] + [""]
    counts = Counter(outcome.sort for outcome in outcomes)
    said = ", ".join(f"{counts[sort]} {sort}" for sort in (SERVED, REFUSED, NOT_BUILT, ERROR))
    return "\n".join([*lines, f"{len(outcomes)} architectures: {said}."])


def main() -> int:
    """Run the command; fails where an architecture is neither served nor refused."""
    options = options_of(__doc__)
    logging.disable(logging.WARNING)
    names = options.only.split(",") if options.only else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="architectures-") as directory,
        serving(Path(directory) / "store", arena_bytes=256 << 20, ssd_bytes=1 << 30) as server,
    ):
        for name in names:
            outcomes.append(alone(name, server.target("unix")))
            print(*(outcomes[-1].name, outcomes[-1].sort, outcomes[-1].text), file=sys.stderr, flush=True)
    found = table(outcomes)
    print(found)
    if options.write:
        options.write.write_text(f"{HEAD}\n{found}\n")
    return int(any(outcome.sort == ERROR for outcome in outcomes))


HEAD = f"""# Every causal architecture

`python -m lab.studies.architectures`, transformers {transformers.__version__}, torch {torch.__version__},
CPU, one thread, float32. Small random models, each in a process of its own. Three turns on a real store,
by a new engine each turn. `=`: every turn's logits equal those of a cache that was never dropped, bit by
bit; otherwise the largest difference over the largest logit.
"""

if __name__ == "__main__":
    sys.exit(main())

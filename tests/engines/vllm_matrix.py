"""Conversations in vLLM that evict each other, over a store to which everything happens.

    .venv-vllm/bin/python -m tests.engines.vllm_matrix  # all of a small random model
    .venv-vllm/bin/python -m tests.engines.vllm_matrix --model DIR --only kv/session
    .venv-vllm/bin/python -m tests.engines.vllm_matrix --write lab/notes/vllm_models.md

For each kind of state, found by the session's name or by the prompt's tokens: in the second turn vLLM's own
blocks were evicted, in the third the store is killed (SIGKILL) and started again, in the fourth it is stopped
(SIGSTOP) and goes on, before the fifth every 64 KiB on its SSD have a changed byte. Then all begins again
with a store that has room for a part. Each prompt is asked of an engine that computes it too, right before:
its reply is the one that is compared, and its time that of the same machine at the same load. `--model` is
one of transformers' directories, with long conversations; without it, all is small. A cell says how many were
equal, which share of the prompts was restored, and how much later than computed the latest first token came.

Run with a small random model by `make engines`.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ctxcache
from ctxcache.errors import SessionNotFound, Unavailable
from lab.engines.families import SHAPE, write_rows
from lab.engines.vllm_process import VllmEngine
from tests.server_process import ServerProcess

CELLS = [f"{state}/{way}" for state in ("blocks", "kv", "hidden") for way in ("session", "prefix")]
EVENTS = ("first", "evicted", "killed", "stopped", "damaged")
"""The event of each turn."""
FULL_TURNS = 3
STALL_S = 1.0
"""The most that a first token may come later than computed, by the longer of two computed ones around it."""


@dataclass(frozen=True)
class Scale:
    """How much is said. Lengths in tokens."""

    conversations: int
    turns: int
    question: int
    answer: int
    store_bytes: int
    small_store_bytes: int

    @property
    def length(self) -> int:
        """Tokens of the longest conversation, in whole blocks."""
        return -(-self.turns * (self.question + self.answer) // 32) * 32

    def asked(self, turn: int, number: int) -> list[int]:
        """The words of a conversation's user in a turn."""
        draw = random.Random(1000 * turn + number)
        return [draw.randrange(3, 500) for _ in range(self.question)]


# A first prompt of 64 tokens and more is saved. The store keeps nothing of shorter ones; the engine's own
# cache does, and rows that no later pass computes are not seen.
SMALL = Scale(6, 5, 70, 12, 64 << 20, 2 << 20)
LARGE = Scale(12, 5, 330, 32, 3 << 30, 256 << 20)


@dataclass
class Outcome:
    """The outcome of a turn's replies."""

    count: int = 0
    equal_count: int = 0
    prompt_count: int = 0
    restored_count: int = 0
    latest_s: float = -1e9

    @property
    def restored(self) -> float:
        """The share of prompt tokens that was not computed."""
        return self.restored_count / max(self.prompt_count, 1)

    def __str__(self) -> str:
        return f"{self.equal_count}/{self.count}, {self.restored:.0%}, {self.latest_s:+.1f} s"


@dataclass
class Conversations:
    """Prompts, and an engine that keeps nothing and computes each of them when it is asked."""

    scale: Scale
    plain: VllmEngine
    _answers: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """By turn and conversation."""

    def turn(self, outcome: Outcome, engine: VllmEngine, session: str | None, turn: int, number: int) -> None:
        """Ask both engines for the reply of a turn, and compare."""
        prompt: list[int] = []
        for earlier in range(turn):
            prompt += [*self.scale.asked(earlier, number), *self._answers[earlier, number]]
        prompt += self.scale.asked(turn, number)
        computed = self.plain.turn(prompt, None, self.scale.answer)
        reply = engine.turn(prompt, session, self.scale.answer)
        self._answers[turn, number] = computed.token_ids
        late_s = reply.took_s - computed.took_s
        if late_s > STALL_S:
            # The machine may have got work between the two.
            again = self.plain.turn(prompt, None, self.scale.answer)
            late_s = reply.took_s - max(computed.took_s, again.took_s)
            if late_s > STALL_S:
                sys.stderr.write(
                    f"turn {turn}, conversation {number}: {reply.took_s:.2f} s, computed in "
                    f"{computed.took_s:.2f} and {again.took_s:.2f} s: {engine.log[-1500:]}\n"
                )
        outcome.count += 1
        outcome.equal_count += reply.token_ids == computed.token_ids
        outcome.prompt_count += len(prompt)
        outcome.restored_count += reply.cached_count
        outcome.latest_s = max(outcome.latest_s, late_s)


def damage(store: ServerProcess) -> None:
    """Change a byte of every 64 KiB on SSD."""
    for path in (store.data_directory / "ssd").glob("*.dat"):
        with path.open("r+b") as file:
            for offset in range(8192 + 2000, path.stat().st_size, 65536):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 0x40]))


def happen(event: str, store: ServerProcess, number: int, conversations: int) -> None:
    """Do to the store what `event` says before a conversation's turn."""
    third = conversations // 3
    if event == "damaged" and number == 0:
        store.terminate()
        damage(store)
        store.start()
    elif event == "killed" and number == third:
        store.kill9()
    elif event == "killed" and number == 2 * third:
        store.start()
    elif event == "stopped" and number == third:
        store.signal(signal.SIGSTOP)
    elif event == "stopped" and number == 2 * third:
        store.signal(signal.SIGCONT)


def wait_until_used(engine: VllmEngine, target: str, name: str) -> None:
    """Wait until the engine has come back to the store, and makes sessions in it."""
    deadline_s = time.monotonic() + 60
    with ctxcache.connect(target) as cache:
        while True:
            engine.turn(range(3, 68), name, 1)
            with suppress(SessionNotFound, Unavailable):
                cache.sessions.get(f"sessions/{name}")
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(engine.log[-4000:])
            time.sleep(0.1)


@contextmanager
def store_at(directory: Path, size_bytes: int, target: str = "") -> Iterator[ServerProcess]:
    """A store whose DRAM has half of its SSD's room, at `target`, by default on a free port."""
    sizes = ("--ssd-size-bytes", str(size_bytes), "--arena-size-bytes", str(size_bytes // 2))
    with ServerProcess(directory, *sizes, *(("--listen", target) if target else ())) as server:
        yield server


def run_cell(cell: str, model: Path, said: Conversations, place: Path) -> dict[str, Outcome]:
    """Hold all conversations in an engine with a store; what became of each event's replies."""
    state, _, way = cell.partition("/")
    scale = said.scale
    outcomes = {event: Outcome() for event in (*EVENTS, "full")}

    def turn(engine: VllmEngine, outcome: Outcome, turn: int, number: int) -> None:
        said.turn(outcome, engine, f"user-{number}" if way == "session" else None, turn, number)

    options: dict[str, Any] = {
        "max_model_len": scale.length,
        # Room for about one conversation: each finds its blocks evicted by the others.
        "num_gpu_blocks_override": scale.length // 32 + 8,
        "enable_prefix_caching": True,
    }
    with store_at(place / "store", scale.store_bytes) as store:
        target = store.target
        with VllmEngine(model, target, place / "log", extra={"state": state}, **options) as engine:
            for number, event in enumerate(EVENTS[: scale.turns]):
                wait_until_used(engine, target, f"probe-{number}")
                for conversation in range(scale.conversations):
                    happen(event, store, conversation, scale.conversations)
                    turn(engine, outcomes[event], number, conversation)
            store.terminate()
            with store_at(place / "small", scale.small_store_bytes, target):
                wait_until_used(engine, target, "probe-full")
                for number in range(min(FULL_TURNS, scale.turns)):
                    for conversation in range(scale.conversations):
                        turn(engine, outcomes["full"], number, conversation)
    return outcomes


def build(directory: Path) -> Path:
    """A small random model, in files."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def said_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Conversations]]:
    """A small random model, and an engine that computes what it says."""
    place = tmp_path_factory.mktemp("matrix")
    model = build(place / "tiny")
    with VllmEngine(model, None, place / "plain.log", max_model_len=SMALL.length) as plain:
        yield model, Conversations(SMALL, plain)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CELLS)
def test_replies_are_right_whatever_happens(
    cell: str, said_by: tuple[Path, Conversations], tmp_path: Path
) -> None:
    """Every reply is the computed one, none comes much later, and what was evicted is restored."""
    model, said = said_by
    outcomes = run_cell(cell, model, said, tmp_path)
    for event, outcome in outcomes.items():
        assert (
            outcome.equal_count
            == outcome.count
            == SMALL.conversations * (FULL_TURNS if event == "full" else 1)
        ), event
        assert outcome.latest_s < STALL_S, event
    assert outcomes["evicted"].restored > 0.3
    assert outcomes["killed"].restored > 0.1
    assert outcomes["stopped"].restored > 0.1


def main(words: Sequence[str]) -> int:
    """Print the table; 1 where a reply differs, or came too late."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a directory of transformers; a small one by default")
    parser.add_argument("--conversations", type=int, help="6 of a small model, 12 of another by default")
    parser.add_argument("--only", default=",".join(CELLS), help="cells, separated by commas")
    parser.add_argument("--write", type=Path, help="a page of Markdown that gets the rows")
    options = parser.parse_args(words)
    cells = options.only.split(",")
    if unknown := set(cells) - set(CELLS):
        parser.error(f"--only: {', '.join(sorted(unknown))} not among {', '.join(CELLS)}")
    scale = LARGE if options.model else SMALL
    if options.conversations is not None and options.conversations < 3:
        parser.error("--conversations: with less than 3 nothing would happen in the middle")
    scale = replace(scale, conversations=options.conversations or scale.conversations)
    header = "| model, conversations, state, found by | " + " | ".join((*EVENTS, "full")) + " |"
    lines = [header, "|---" * (len(EVENTS) + 2) + "|"]
    is_good = True
    for cell in cells:
        with tempfile.TemporaryDirectory(prefix="ctxcache-matrix-") as directory:
            place = Path(directory)
            model = options.model or build(place / "small-llama")
            with VllmEngine(model, None, place / "plain.log", max_model_len=scale.length) as plain:
                outcomes = run_cell(cell, model, Conversations(scale, plain), place)
            # While the store's files are still there: to remove them may take a busy disk minutes.
            name = f"{model.resolve().name}, {scale.conversations}, {cell.replace('/', ', ')}"
            lines.append(f"| {name} | " + " | ".join(map(str, outcomes.values())) + " |")
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
            if options.write:
                write_rows(options.write, "matrix", lines)
        for outcome in outcomes.values():
            is_good &= outcome.equal_count == outcome.count and outcome.latest_s < STALL_S
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

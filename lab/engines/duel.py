#!/usr/bin/env python3
"""The same faults against vLLM's file tier and against the store as its tier: how many replies are wrong.

    .venv-vllm/bin/python -m lab.engines.duel                             # a table
    .venv-vllm/bin/python -m lab.engines.duel --prompts 1000 --only flipped,swapped
    .venv-vllm/bin/python -m lab.engines.duel --prompts 1700 --contender ctxcache --results duel.jsonl

An engine computes and saves each prompt, and ends. Then what lies on disk is damaged, and a new engine of the
same name gets the same prompts. Every reply is compared, token for token, with that of an engine that keeps
nothing. A small random model; the engine is vLLM itself on a CPU, and both tiers lie behind the same
connector. Both contenders are damaged by the same code, at the same seed. With `--results` each fault's
outcome is kept in a file, and a run that was broken off goes on behind it.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lab.bench.server import Server, ServerDidNotStart, serving
from lab.engines.families import build
from lab.engines.turns import TIERED_HOST_BYTES
from lab.engines.vllm_process import VllmEngine

PROMPT_TOKENS = 97
"""Three blocks of 32, and one token that is computed."""
COUNT = 8
BATCH = 16
STOP_S = 60
SLOT_MAGIC = b"CTXCSEG\0"
PAGE_BYTES = 4096
BEGIN, END = "<!-- duel -->\n", "<!-- end of duel -->"

Replies = list[tuple[int, ...]]


class Extent(NamedTuple):
    """Where one block lies on disk, with what the contender writes about it beside."""

    path: Path
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Replies after one fault: all, those that reused saved state, and those that were wrong."""

    contender: str
    fault: str
    reply_count: int
    reused_count: int
    wrong_count: int
    words: str = ""

    def __str__(self) -> str:
        if self.words:
            return self.words
        wrong = f"**{self.wrong_count} wrong**" if self.wrong_count else "0 wrong"
        return f"{wrong}, {self.reused_count} reused"


# -- contenders -----------------------------------------------------------------------------------------


class FileTier:
    """The file tier that vLLM has."""

    name = "vLLM's file tier"

    @contextmanager
    def engine(self, model: Path, place: Path) -> Iterator[VllmEngine]:
        """An engine on what lies in `place`."""
        tiers = [{"type": "fs", "root_dir": str(place / "state")}]
        with _engine(model, place, "OffloadingConnector", {"secondary_tiers": tiers}) as engine:
            yield engine

    def extents(self, place: Path) -> list[Extent]:
        """Each block's file."""
        files = sorted((place / "state").rglob("*.bin"))
        return [Extent(path, 0, path.stat().st_size) for path in files]


class StoreTier:
    """The store, in a process of its own."""

    name = "ctxcache"

    @contextmanager
    def engine(self, model: Path, place: Path) -> Iterator[VllmEngine]:
        """An engine and a store on what lies in `place`. Raises ServerDidNotStart."""
        with serving(place / "state", arena_bytes=1 << 28, ssd_bytes=1 << 29) as server:
            extra = {"target": server.target("tcp")}
            with _engine(model, place, "CtxcacheOffloadingConnector", extra) as engine:
                yield engine
            _end(server)

    def extents(self, place: Path) -> list[Extent]:
        """Each block's slot: its header, and its bytes."""
        (path,) = (place / "state").rglob("segments.dat")
        content = path.read_bytes()
        begins = [
            at
            for at in range(0, len(content), PAGE_BYTES)
            if content[at : at + len(SLOT_MAGIC)] == SLOT_MAGIC
        ]
        if len(begins) < 2:
            raise RuntimeError(f"{path} has {len(begins)} slots: nothing was saved")
        distances = (end - begin for begin, end in pairwise(begins))
        (size, _), *_ = Counter(distances).most_common()
        return [Extent(path, begin, begin + size) for begin in begins]


def _end(server: Server) -> None:
    """Let it write what is unwritten, unless it was killed."""
    server.process.terminate()
    server.process.wait(STOP_S)


@contextmanager
def _engine(model: Path, place: Path, connector: str, extra: Mapping[str, Any]) -> Iterator[VllmEngine]:
    settings = {
        "spec_name": "TieringOnCpu",
        "spec_module_path": "lab.engines.offload_on_cpu",
        "cpu_bytes_to_use": TIERED_HOST_BYTES,
        "block_size": 32,
    }
    transfer = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings | dict(extra),
    }
    with VllmEngine(
        model,
        None,
        place / "engine.log",
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
    ) as engine:
        yield engine


Contender = FileTier | StoreTier
CONTENDERS: tuple[Contender, ...] = (FileTier(), StoreTier())


# -- faults ---------------------------------------------------------------------------------------------

Fault = Callable[[Sequence[Extent], random.Random], None]


def flip_bits(extents: Sequence[Extent], draw: random.Random) -> None:
    """One bit of each block."""
    for extent in extents:
        with extent.path.open("r+b") as file:
            at = draw.randrange(extent.begin, extent.end)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))


def flip_high_bits(extents: Sequence[Extent], draw: random.Random) -> None:
    """The highest bit but one of 64 numbers of each block: exponents of floats."""
    for extent in extents:
        with extent.path.open("r+b") as file:
            for _ in range(64):
                at = draw.randrange(extent.begin + PAGE_BYTES, extent.end) // 4 * 4 + 3
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 0x40]))


def swap_blocks(extents: Sequence[Extent], draw: random.Random) -> None:
    """Each block's bytes in the place of another's."""
    order = list(extents)
    draw.shuffle(order)
    contents = [_read(extent) for extent in order]
    for extent, content in zip(order, contents[1:] + contents[:1], strict=True):
        _write(extent, content)


def cut_files(extents: Sequence[Extent], draw: random.Random) -> None:
    """The second half of each file is gone."""
    del draw
    for path in {extent.path for extent in extents}:
        end = max(extent.end for extent in extents if extent.path == path)
        with path.open("r+b") as file:
            file.truncate(end // 2)


def clear_halves(extents: Sequence[Extent], draw: random.Random) -> None:
    """The second half of each block is zeros, as of a file that a power cut kept from being written."""
    del draw
    for extent in extents:
        content = _read(extent)
        _write(extent, content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def nothing(extents: Sequence[Extent], draw: random.Random) -> None:
    """No damage: what a restart of both gives."""
    del extents, draw


FAULTS: Mapping[str, tuple[str, Fault]] = {
    "restart": ("none: engine and store are started again", nothing),
    "flipped": ("a bit flipped in each block", flip_bits),
    "exponents": ("64 exponents changed in each block", flip_high_bits),
    "swapped": ("blocks in each other's places", swap_blocks),
    "cleared": ("the second half of each block is zeros", clear_halves),
    "truncated": ("files cut in half", cut_files),
    "stale": ("the state's files as they were before its last half", nothing),
    "killed": ("the engine killed after its last reply", nothing),
    "model": ("other weights under the same name", nothing),
}


def _read(extent: Extent) -> bytes:
    with extent.path.open("rb") as file:
        file.seek(extent.begin)
        return file.read(extent.end - extent.begin)


def _write(extent: Extent, content: bytes) -> None:
    with extent.path.open("r+b") as file:
        file.seek(extent.begin)
        file.write(content)


# -- a duel ---------------------------------------------------------------------------------------------


def prompts_of(count: int) -> list[list[int]]:
    """Prompts that have nothing in common."""
    draw = random.Random(11)  # noqa: S311  the same prompts in every run
    return [[draw.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def ask(engine: VllmEngine, prompts: Sequence[list[int]]) -> tuple[Replies, int]:
    """The replies, and how many of them reused something."""
    replies: Replies = []
    reused_count = 0
    for begin in range(0, len(prompts), BATCH):
        requests = [
            {"prompt": one, "session": None, "count": COUNT} for one in prompts[begin : begin + BATCH]
        ]
        answers = engine.ask(*requests)
        replies += [answer.token_ids for answer in answers]
        reused_count += sum(answer.cached_count > 0 for answer in answers)
    return replies, reused_count


def fight(
    contender: Contender, models: Path, prompts: Sequence[list[int]], faults: Sequence[str], place: Path
) -> Iterator[tuple[str, Replies, int, str]]:
    """A contender's replies after each fault: replies, how many reused, or its error."""
    if not faults:
        return
    saved, older = place / "saved", place / "older"
    saved.mkdir(parents=True)
    middle = len(prompts) // 2
    model = current(models, 1)
    for half in (prompts[:middle], prompts[middle:]):
        with contender.engine(model, saved) as engine:
            ask(engine, half)
        if not older.exists():
            shutil.copytree(saved, older)
    for fault in faults:
        damaged = place / "damaged"
        shutil.copytree(saved, damaged)
        if fault == "stale":
            # A file of many blocks once: thousands of copies of it took hours.
            for path in {extent.path for extent in contender.extents(older)}:
                shutil.copy(path, damaged / path.relative_to(older))
        if fault == "killed":
            shutil.rmtree(damaged)
            damaged.mkdir()
            with contender.engine(model, damaged) as engine:
                ask(engine, prompts)
                engine.kill()
        _, damage = FAULTS[fault]
        if damage is not nothing:
            damage(contender.extents(damaged), random.Random(5))  # noqa: S311  the same for each contender
        try:
            with contender.engine(current(models, 2 if fault == "model" else 1), damaged) as engine:
                yield fault, *ask(engine, prompts), ""
        except ServerDidNotStart as error:
            yield fault, [], 0, f"refuses to start: {str(error).strip().splitlines()[-1][:120]}"
        finally:
            current(models, 1)
            shutil.rmtree(damaged)


def current(models: Path, number: int) -> Path:
    """The model's directory, with the weights of that number."""
    path = models / "current"
    path.unlink(missing_ok=True)
    path.symlink_to(models / str(number) / "llama")
    return path


def kept(path: Path, prompt_count: int) -> list[Outcome]:
    """The outcomes in a file. Raises ValueError for one of another number of prompts."""
    lines = path.read_text().splitlines() if path.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    for one in outcomes:
        if not one.words and one.reply_count != prompt_count:
            raise ValueError(f"{path}: {one.contender}, {one.fault}: {one.reply_count} prompts")
    return outcomes


def table_of(outcomes: Sequence[Outcome]) -> str:
    """A table in Markdown: a fault per line, a contender per column."""
    names = list(dict.fromkeys(one.contender for one in outcomes))
    lines = [f"| fault | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for fault in dict.fromkeys(one.fault for one in outcomes):
        found = {one.contender: one for one in outcomes if one.fault == fault}
        lines.append(f"| {FAULTS[fault][0]} | {' | '.join(str(found[name]) for name in names)} |")
    sums = (sum(one.wrong_count for one in outcomes if one.contender == name) for name in names)
    totals = [sum(one.reply_count for one in outcomes if one.contender == name) for name in names]
    cells = [f"{wrong:,} of {total:,} wrong" for wrong, total in zip(sums, totals, strict=True)]
    return "\n".join([*lines, f"| **all** | {' | '.join(cells)} |"])


def main() -> int:
    """Run the faults that are asked for; exits with 1 where a reply from the store is wrong."""
    parser = argparse.ArgumentParser(prog="lab.engines.duel", description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=300, help="replies per fault and contender")
    parser.add_argument("--only", default=",".join(FAULTS), help="faults, separated by commas")
    names = [one.name for one in CONTENDERS]
    parser.add_argument("--contender", choices=names, action="append", help="all by default")
    parser.add_argument("--write", type=Path, help="a page of Markdown whose table is to be replaced")
    parser.add_argument("--results", type=Path, help="a file of outcomes: what it has is not run again")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each fault")
    options = parser.parse_args()
    faults = options.only.split(",")
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"--only: {', '.join(sorted(unknown))} not among {', '.join(FAULTS)}")
    prompts = prompts_of(options.prompts)
    outcomes = kept(options.results, options.prompts) if options.results else []
    with tempfile.TemporaryDirectory(prefix="ctxcache-duel-") as directory:
        place, models = Path(directory), Path(directory) / "models"
        expected = {}
        for number in (1, 2):
            build("llama", models / str(number), seed=number)
            # As the others ask, so that batches are the same.
            with VllmEngine(current(models, number), None, place / "plain.log") as engine:
                expected[number], _ = ask(engine, prompts)
        for contender in CONTENDERS:
            if contender.name not in (options.contender or names):
                continue
            done = {one.fault for one in outcomes if one.contender == contender.name}
            left = [fault for fault in faults if fault not in done]
            came = fight(contender, models, prompts, left, place / contender.name.partition(" ")[0])
            for fault, replies, reused_count, words in came:
                right = expected[2 if fault == "model" else 1]
                wrong_count = sum(one != other for one, other in zip(replies, right, strict=False))
                outcomes.append(
                    Outcome(contender.name, fault, len(replies), reused_count, wrong_count, words)
                )
                sys.stderr.write(f"{contender.name}: {fault}: {outcomes[-1]}\n")
                if options.results:
                    with options.results.open("a") as file:
                        file.write(json.dumps(asdict(outcomes[-1])) + "\n")
                if options.json:
                    print(json.dumps(asdict(outcomes[-1])), flush=True)
    table = table_of(outcomes)
    if not options.json:
        print(table)
    if options.write:
        head, _, rest = options.write.read_text().partition(BEGIN)
        options.write.write_text(f"{head}{BEGIN}{table}\n{END}{rest.partition(END)[2]}")
    return 1 if any(one.wrong_count for one in outcomes if one.contender == StoreTier.name) else 0


if __name__ == "__main__":
    sys.exit(main())

"""A conversation on three hosts: a router moves every second turn, one store is killed and one is frozen.

    make fleet-demo
    python -m lab.demo.fleet --turns 12 --json

Each host is a store of its own at an address of its own, 127.0.1.N, with an engine beside it that keeps
nothing between turns. One conversation is held twice: on an engine that drops nothing, and by turns that land
where the router says. Every reply is compared. Exit code 1 when one differs. Worst case: no room in shared
memory.
"""

import argparse
import json
import secrets
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ctxcache.client import Client
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Turn
from gpu_worker.planning.plan import Method
from lab.demo.building import progress_bars
from lab.demo.conversation import Reference, Script
from lab.demo.embedded_store import EmbeddedStore
from lab.demo.subject import Subject, subjects

HOSTS = 3
BEAT_S = 0.5
REPLY_TOKENS = 24
TURN_TOKENS = 48
OPENING_TOKENS = 512


@dataclass(frozen=True, slots=True)
class FleetTurn:
    """One turn: where it ran, what it found and where that came from."""

    number: int
    host: int
    event: str
    history_token_count: int
    found_token_count: int
    computed_token_count: int
    moved_bytes: int
    first_token_ms: float
    never_dropped_ms: float
    is_equal: bool


class Fleet:
    """The hosts' stores."""

    def __init__(self, directory: Path, size_bytes: int, held: ExitStack) -> None:
        secret = directory / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        self.stores = []
        for number in range(HOSTS):
            data, arena = directory / f"host{number}", directory / f"arena{number}"
            data.mkdir()
            arena.mkdir()
            options = {
                "--listen": f"127.0.1.{number + 1}:0",
                "--fleet-bucket": f"file://{directory}/bucket",
                "--fleet-secret-file": str(secret),
                "--fleet-beat-s": str(BEAT_S),
            }
            store = EmbeddedStore(data, arena, size_bytes=size_bytes, options=options)
            held.callback(store.close)
            store.start()
            self.stores.append(store)

    def client(self, host: int) -> Client:
        """A client of one host's store."""
        return self.stores[host].client


def hold(subject: Subject, turn_count: int) -> list[FleetTurn]:
    """Hold the conversation. Raises what the stores raise."""
    script = Script(turn_count, OPENING_TOKENS, TURN_TOKENS, REPLY_TOKENS)
    method = subject.methods[1]
    directory = Path(tempfile.mkdtemp(prefix="ctxcache-fleet-"))
    with ExitStack() as held:
        held.callback(shutil.rmtree, directory, ignore_errors=True)
        fleet = Fleet(directory, subject.size_bytes(script.token_count, (method,)), held)
        reference, session_id = Reference(subject), f"demo-{secrets.token_hex(4)}"
        turns, host = list[FleetTurn](), 0
        kill_at, freeze_at = turn_count // 3 + 1, 2 * turn_count // 3 + 1
        for number, text in enumerate(script.texts(subject)[:turn_count], start=1):
            owner = host
            if number % 2 == 0 or number in (kill_at, freeze_at):
                host = (host + 1) % HOSTS
            event = ""
            if number == kill_at:
                fleet.stores[owner].kill()
                event = f"{owner + 1} killed"
            elif number == freeze_at:
                fleet.stores[owner].send(signal.SIGSTOP)
                event = f"{owner + 1} frozen"
            told = reference.turn(text, REPLY_TOKENS, lambda _token: None)
            before = fleet.client(host).admin.fleet().arrived_bytes
            turn = _turn(
                fleet.client(host),
                subject,
                method,
                session_id,
                told.new_token_ids,
                reference,
                len(told.token_ids),
            )
            moved = fleet.client(host).admin.fleet().arrived_bytes - before
            turns.append(
                FleetTurn(
                    number=number,
                    host=host + 1,
                    event=event,
                    history_token_count=told.history_token_count,
                    found_token_count=turn.reused_token_count,
                    computed_token_count=turn.prefilled_token_count,
                    moved_bytes=moved,
                    first_token_ms=turn.first_token_ns / 1e6,
                    never_dropped_ms=told.first_token_ns / 1e6,
                    is_equal=turn.token_ids == told.token_ids,
                )
            )
            if number == kill_at:
                fleet.stores[owner].start()
            elif number == freeze_at:
                fleet.stores[owner].send(signal.SIGCONT)
                # It hears at its next beat what was taken from it.
                time.sleep(3 * BEAT_S)
        return turns


def _turn(
    client: Client,
    subject: Subject,
    method: Method,
    session_id: str,
    new_ids: list[int],
    reference: Reference,
    reply_tokens: int,
) -> Turn:
    history = reference.token_ids[: -len(new_ids) - reply_tokens]
    with TransformersEngine(subject.model, client, subject.spec, subject.plan(method)) as engine:
        turn = engine.turn(session_id, new_ids, max_new_tokens=reply_tokens, history=history)
        if (failure := engine.wait(session_id)) is not None:
            raise failure
    return turn


def _show(turns: list[FleetTurn], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for head in ("TURN", "HOST", "HISTORY", "FOUND", "COMPUTED", "CAME MB", "FIRST ms", "KEPT ms"):
        table.add_column(head, justify="right")
    table.add_column("REPLY")
    table.add_column("")
    for turn in turns:
        table.add_row(
            *map(str, (turn.number, turn.host, turn.history_token_count, turn.found_token_count)),
            str(turn.computed_token_count),
            f"{turn.moved_bytes / 1e6:.1f}" if turn.moved_bytes else "-",
            f"{turn.first_token_ms:.0f}",
            f"{turn.never_dropped_ms:.0f}",
            "equal" if turn.is_equal else "DIFFERS",
            turn.event,
        )
    console.print(table)
    equal = sum(turn.is_equal for turn in turns)
    console.print(f"\n{equal} of {len(turns)} replies are those of an engine that never dropped anything,")
    console.print("whose times are under KEPT. What came over is in the first token's time.")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a local transformers model; SmolLM2-135M-Instruct")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    console = Console(highlight=False, stderr=asked.json)
    with progress_bars(console) as progress:
        subject = next(subjects(asked.model, with_twin=False, progress=progress))
    turns = hold(subject, asked.turns)
    if asked.json:
        sys.stdout.write(json.dumps({"turns": [asdict(turn) for turn in turns]}) + "\n")
    else:
        _show(turns, console)
    raise SystemExit(not all(turn.is_equal for turn in turns))


if __name__ == "__main__":
    main()

"""Local reads, saves and decode steps of a running server, beside one-thread copies of the same bytes.

    python -m ctxcache.bench.local --directory /var/tmp/ctxcache-bench

Each row is measured in every round, interleaved, with 128 MiB walked in between, and given as the median
of seconds divided by the same round's copy. Worst case: other load on the machine, which the spread shows.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from ctxcache.bench.ssd_served import Rows, make_rows, serving
from ctxcache.client.client import Client
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.v1.session_pb2 import Session

LAYERS = 32
ROW_BYTES = 4096
TOKEN_COUNT = 512
LANES = 64
ARENA_BYTES = 1536 << 20
WALK_BYTES = 128 << 20
WAYS = ("local-socket", "local-grpc")
Sample = dict[str, float]


def make_model() -> ModelSpec:
    """32 streams of 4 KiB rows: 64 tokens are 8 MiB, 512 are 64 MiB."""
    specs = tuple(StreamSpec(Stream(i, StateKind.HIDDEN), ROW_BYTES, DType.FLOAT16) for i in range(LAYERS))
    return ModelSpec(
        model_id="bench", architecture="Bench", revision="", weights_digest="", tokenizer_digest="",
        dtype=DType.FLOAT16, layer_count=LAYERS, hidden_size=ROW_BYTES // 2, kv_head_count=1, head_size=64,
        rope="", norm="", is_relocatable=True, streams=specs,
    )  # fmt: skip


class LocalRig:
    """A 64 MiB session in a running server, clients by each way, and warm buffers of the same shapes."""

    def __init__(self, clients: dict[str, Client]) -> None:
        self.clients = clients
        self.model = make_model()
        self.layout = [TOKENS, *(spec.stream for spec in self.model.streams)]
        first = clients[WAYS[0]]
        first.register_model(self.model)
        self.rows: Rows = make_rows(self.model, TOKEN_COUNT)
        self.rows.setdefault(TOKENS, np.ones((TOKEN_COUNT, 4), np.uint8))
        self.outs = [{s: np.ones_like(r) for s, r in self.rows.items()} for _ in range(2)]
        self.session = first.append(self._create("read"), self.rows)
        self._walked = np.ones(WALK_BYTES, np.uint8)

    def walk(self) -> None:
        """Put something else into the caches."""
        self._walked.sum()

    def copy(self, out: int = 0) -> None:
        """The limit: every stream's rows from private memory to private memory, warm on both sides."""
        for stream, rows in self.rows.items():
            np.copyto(self.outs[out][stream], rows)

    def hand_over(self, way: str) -> None:
        """Acquire, view every row, release."""
        with self.clients[way].read(self.session) as found:
            for stream in found.streams:
                found.pieces(stream)
            found.check()

    def copy_out(self, way: str, out: int = 0) -> None:
        """Acquire, copy every row, release."""
        with self.clients[way].read(self.session) as found:
            for stream in found.streams:
                found.array(stream, out=self.outs[out][stream])

    def save(self, way: str) -> float:
        """Reserve, write, commit into DRAM; seconds, without creating and deleting the session."""
        session = self._create("saved")
        seconds = timed(lambda: self.clients[way].append(session, self.rows))
        self.clients[way].delete_session(session.name)
        return seconds

    def round(self) -> Sample:
        """Measure everything once, in seconds."""
        found: Sample = {}
        for way in WAYS:
            for name, act in (("hand over", self.hand_over), ("copy out", self.copy_out)):
                self.walk()
                found[f"{name}, {way}"] = timed(lambda act=act, way=way: act(way))  # type: ignore[misc]
            self.walk()
            found[f"save, {way}"] = self.save(way)
        self.walk()
        found["copy"] = timed(self.copy)
        found["two readers"] = both(lambda i: self.copy_out(WAYS[i], i))
        found["two copies"] = both(self.copy)
        return found

    def _create(self, name: str) -> Session:
        return self.clients[WAYS[0]].create_session("models/bench", session_id=name, layout=self.layout)


def decode_steps(client: Client, layout: Sequence[Stream], step_count: int) -> list[Sample]:
    """Steps of 64 sessions by one token, each beside a copy of the step's rows."""
    names = [client.create_session("models/bench", session_id=f"d{i}", layout=layout) for i in range(LANES)]
    rows = {s: np.ones((LANES, 4 if s == TOKENS else ROW_BYTES), np.uint8) for s in layout}
    outs = {stream: np.ones_like(array) for stream, array in rows.items()}

    def copy() -> None:
        for stream in layout:
            np.copyto(outs[stream], rows[stream])

    with client.decode_batch(names) as batch:

        def step() -> None:
            for stream in layout:
                batch.write(stream, rows[stream])
            batch.commit()

        return [{"copy of the step": timed(copy), "step": timed(step)} for _ in range(step_count)]


def timed(act: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def both(act: Callable[[int], object]) -> float:
    """Seconds for two threads to do it at once."""
    threads = [threading.Thread(target=act, args=(i,)) for i in range(2)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return timed(run)


def ratios(samples: Sequence[Sample], limit: str) -> dict[str, tuple[float, float, float]]:
    """Each row's seconds over the limit's of the same round: quartile, median, quartile."""
    return {
        name: tuple(quantiles([s[name] / s[limit] for s in samples]))  # type: ignore[misc]  # three of them
        for name in samples[0]
        if name != limit
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="empty or new; removed at the end")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        ready = stack.enter_context(serving(options.directory, ARENA_BYTES, 256 << 20))
        target = ready["listen_addresses"][0]  # type: ignore[index]  # JSON
        clients = {way: stack.enter_context(Client(target, access=way)) for way in WAYS}  # type: ignore[arg-type]
        rig = LocalRig(clients)
        for way in WAYS:
            rig.save(way)
            rig.copy_out(way)
        time.sleep(2)
        rounds = [rig.round() for _ in range(options.rounds)]
        steps = decode_steps(clients[WAYS[0]], rig.layout, 60)
    table = ratios(rounds, "copy") | ratios(steps, "copy of the step")
    copy_s = median(sample["copy"] for sample in rounds)
    if options.json:
        sys.stdout.write(json.dumps({"copy_s": copy_s, "arena": ready["arena"], "ratios": table}) + "\n")
        return 0
    sys.stdout.write(f"copy of 64 MiB: {copy_s * 1e3:.2f} ms; the others as multiples of its time\n")
    for name, (low, middle, high) in table.items():
        sys.stdout.write(f"  {name:28s} {middle:6.3f}  ({low:.3f} to {high:.3f})\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

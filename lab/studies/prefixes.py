"""The cost of finding a prompt and of beginning a session with it.

MatchPrefix and AdoptPrefix over the socket.

    python -m lab.studies.prefixes --tokens 4096,131072 --adopted 100000

One session of a model with one small stream has the tokens. No rpc came for a second before prompts are
looked for, since work in pieces rests longer while rpcs come; sessions are made by rpcs just before they
adopt. Each call is timed at the caller, and by the processor time of the server's event loop. Medians, and
the 10th and 90th percentile.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import numpy as np

import ctxcache
from ctxcache.client import CallerModel, Client, Durability
from ctxcache.client.types import LookupState, PrefixMatch
from ctxcache.format.streams import TOKENS
from ctxcache.service.fairness import RPCS_NS
from lab.bench.contexts import model_of
from lab.bench.row import Scale
from lab.bench.server import serving

ROOM_BYTES = 512 << 20
ROW_BYTES = 64


def loop_cpu_s(pid: int) -> float:
    """Processor time so far of the process's first thread, which runs the event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def measure(call: Callable[[int], object], count: int, pid: int) -> str:
    """Time a call; returns what to print."""
    call(0)
    taken_s, cpu_s = list[float](), list[float]()
    for number in range(1, count + 1):
        begin_cpu_s, begin_s = loop_cpu_s(pid), time.perf_counter()
        call(number)
        taken_s.append(time.perf_counter() - begin_s)
        cpu_s.append(loop_cpu_s(pid) - begin_cpu_s)
    tens = quantiles(taken_s, n=10)
    at_caller = f"{1e3 * median(taken_s):.3f} ms [{1e3 * tens[0]:.3f}-{1e3 * tens[-1]:.3f}]"
    return f"{at_caller}, of the event loop {1e3 * median(cpu_s):.3f} ms"


def match(client: Client, model: CallerModel, prompt: "np.typing.NDArray[np.int32]", _: int) -> PrefixMatch:
    """Look for a prompt."""
    return client.prefixes.match(model, prompt)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="4096,131072", help="lengths of prompts to find")
    parser.add_argument("--adopted", type=int, default=100_000, help="tokens that new sessions begin with")
    parser.add_argument("--count", type=int, default=100, help="calls of each kind")
    arguments = parser.parse_args()
    lengths = [int(each) for each in arguments.tokens.split(",")]
    spec = model_of(Scale(1, 1, 64, ROW_BYTES, call_count=0, segment_count=0))
    ids = np.random.default_rng(1).integers(0, 1 << 30, max(*lengths, arguments.adopted), np.int32)
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(Path(directory) / "data", arena_bytes=ROOM_BYTES, ssd_bytes=ROOM_BYTES) as server,
        ctxcache.connect(server.target("unix"), access="local", transport="socket") as client,
    ):
        model = client.models.register(spec)
        chat = client.sessions.create(model, ttl=timedelta(hours=1))
        rows = {each.stream: np.zeros((len(ids), each.row_bytes), np.uint8) for each in spec.streams}
        chat.append({TOKENS: ids.view(np.uint8).reshape(-1, 4), **rows}, durability=Durability.DISK)
        time.sleep(RPCS_NS / 1e9)
        for length in lengths:
            prompt = ids[:length]
            found = client.prefixes.match(model, prompt)
            if found.state is not LookupState.HIT or found.token_count != length:
                raise SystemExit(f"{found} in the place of {length} tokens")
            text = measure(partial(match, client, model, prompt), arguments.count, server.pid)
            print(f"MatchPrefix of {length} tokens: {text}")
        prompt = ids[: arguments.adopted // 64 * 64]
        new = [client.sessions.create(model, ttl=timedelta(hours=1)) for _ in range(arguments.count + 1)]
        text = measure(lambda number: new[number].adopt(prompt), arguments.count, server.pid)
        print(f"AdoptPrefix of {len(prompt)} tokens: {text}")


if __name__ == "__main__":
    main()

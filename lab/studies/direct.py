#!/usr/bin/env python3
"""Sessions that lie only on SSD: restored through the store, and from its files by each path there is.

    python -m lab.studies.direct      # SmolLM2-135M's shape on a CPU: the store and POSIX
    python -m lab.studies.direct --shape llama-2-7b --layers 8 --tokens 4096 --device cuda --json

From the lease to the last usable layer, all ways in turn in each round, ratios within a round. The cost of
verifying is the same path beside itself with checksums left out. Random weights and rows; a store of its own.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
import typer

import ctxcache
from ctxcache.client import Client
from ctxcache.client import rows as client_rows
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.errors import CacheError
from ctxcache.format.streams import TOKENS, Stream
from gpu_worker.direct import Wanted, storage
from gpu_worker.direct.storage import DirectStorage, probe_kvikio
from gpu_worker.families import Adapter
from gpu_worker.forms.rows import pack_rows
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.compute import KernelWeights, compute_for
from gpu_worker.pipeline.lane import Deadline, device_of
from gpu_worker.pipeline.pipeline import Pipeline
from gpu_worker.pipeline.sources import BatchLanding
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.planning.plan import Method, RestorePlan, RestoreSchedule
from lab.demo.embedded_store import embedded_store
from lab.demo.machine import this_machine
from lab.restoring.models import SHAPES, random_model

STORE = "store"
METHODS = (Method.KV, Method.HIDDEN)
PATIENCE_S = 60.0
_MIB = 1 << 20


class Bed:
    """One model, its sessions on SSD, and a pipeline."""

    def __init__(self, adapter: Adapter, client: Client, pipeline: Pipeline) -> None:
        self._adapter, self._client, self._pipeline = adapter, client, pipeline
        self._weights = KernelWeights(adapter)
        self._spec = model_spec(adapter.model, model_id="direct-bench")
        self._model = client.models.register(self._spec)

    def save(self, method: Method, token_count: int) -> SessionInfo:
        """A session of random rows."""
        adapter = self._adapter
        streams = [Stream(layer, method.kind) for layer in range(len(adapter.layers))]
        size = adapter.hidden_size if method is Method.HIDDEN else adapter.row_size
        rows = {TOKENS: np.zeros((token_count, 4), np.uint8)}
        for spec in (one for one in self._spec.resolve(streams) if one.stream != TOKENS):
            data = pack_rows(torch.randn(token_count, size, dtype=adapter.model.dtype), spec)
            rows[spec.stream] = np.frombuffer(data, np.uint8).reshape(token_count, -1)
        session = self._client.sessions.create(self._model, id=method.value, layout=[TOKENS, *streams])
        return session.append(rows, durability=Durability.DISK)

    def leave(self, session: SessionInfo) -> None:
        """Have it on SSD only."""
        end_s = time.monotonic() + PATIENCE_S
        while self._client.sessions.get(session.name).dram_bytes:
            if time.monotonic() > end_s:
                raise TimeoutError("the store keeps it in memory")
            self._client.hints.demote(session.name)

    def restore(
        self, direct: DirectStorage, session: SessionInfo, method: Method
    ) -> tuple[float, torch.Tensor]:
        """Seconds, and the last layer's keys."""
        adapter, count = self._adapter, session.token_count
        target = CacheTarget(adapter, count)
        plan = RestorePlan.uniform(method, target.layer_count)
        schedule = RestoreSchedule.of_methods(plan, count, [0] * target.layer_count)
        compute = compute_for(adapter, self._weights, torch.arange(count))
        begin = time.perf_counter()
        with (
            direct.read(session, self._model, streams=plan.streams()) as rows,
            direct.source(rows, self._model) as source,
            self._pipeline.start(
                schedule, source, target, compute, deadline=Deadline.after_s(PATIENCE_S)
            ) as restoration,
        ):
            restoration.wait_all()
            taken = time.perf_counter() - begin
        return taken, target.tensors(target.layer_count - 1)[0].clone()


class _Anything(int):
    """A checksum that differs from none."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


@contextmanager
def unverified() -> Iterator[None]:
    """Within it chunks of files are not verified: what that saves is what verifying costs."""

    def anything(*_: object, **__: object) -> _Anything:
        return _Anything()

    with (
        mock.patch.object(client_rows, "chunk_checksum", anything),
        mock.patch.object(BatchLanding, "sum_up", return_value=None),
    ):
        yield


def ways(client: Client, device: torch.device) -> dict[str, DirectStorage]:
    """The store, and each path that is live here."""
    found = {STORE: DirectStorage(client, device, Wanted.OFF)}
    wanted = (Wanted.GDS, Wanted.COMPAT, Wanted.POSIX) if device.type == "cuda" else (Wanted.POSIX,)
    with mock.patch.object(storage, "probe_kvikio", return_value=probe_kvikio(device)):
        for each in wanted:
            direct = DirectStorage(client, device, each)
            found.setdefault(direct.live.path.value, direct)
    return found


def measured(
    bed: Bed, found: dict[str, DirectStorage], method: Method, tokens: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """One row a way."""
    session = bed.save(method, tokens)
    seconds: dict[str, list[float]] = defaultdict(list)
    cases: list[tuple[str, DirectStorage, Callable[[], Any]]] = []
    for way, direct in found.items():
        cases.append((way, direct, nullcontext))
        if way != STORE:
            cases.append((f"{way}, not verified", direct, unverified))
    expected = None
    for number in range(rounds + 1):
        for way, direct, state in cases:
            bed.leave(session)
            with state():
                taken, keys = bed.restore(direct, session, method)
            expected = keys if expected is None else expected
            if not torch.equal(keys, expected):
                raise SystemExit(f"{way} restores something else")
            if direct.failures:
                raise SystemExit(f"{way} gave its files up: {dict(direct.failures)}")
            if number:
                seconds[way].append(taken)
    row_bytes = sum(spec.row_bytes for spec in bed._spec.streams if spec.stream.kind is method.kind)  # noqa: SLF001
    for way, taken_s in seconds.items():
        base = seconds.get(f"{way}, not verified")
        yield {
            "rows": method.value,
            "way": way,
            "path": found[way.split(",")[0]].live.reason,
            "median_s": statistics.median(taken_s),
            "megabytes": round(tokens * row_bytes / 1e6, 1),
            "of_store": statistics.median(a / b for a, b in zip(taken_s, seconds[STORE], strict=True)),
            "verifying": (
                None
                if base is None
                else statistics.median(a / b - 1 for a, b in zip(taken_s, base, strict=True))
            ),
        }


def main(
    *,
    shape: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}.")] = "smollm2-135m",
    layers: Annotated[int, typer.Option(help="At most; 0: all.", min=0)] = 0,
    tokens: Annotated[int, typer.Option(help="Of history.", min=64)] = 1024,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Rounds that count.", min=2)] = 9,
    threads: Annotated[int, typer.Option(help="Of torch.", min=1)] = 1,
    directory: Annotated[Path | None, typer.Option(help="Where the store keeps its data.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Measure, check and print."""
    torch.set_num_threads(threads)
    where = torch.device(device)
    subject = random_model(shape, where, layers=layers, token_count=tokens)
    adapter = adapt(subject.model)
    facts = {
        "what": "direct",
        "model": shape,
        "layers": len(adapter.layers),
        "tokens": tokens,
        "rounds": rounds,
        "device": torch.cuda.get_device_name() if where.type == "cuda" else this_machine().title,
        "date": datetime.now(UTC).date().isoformat(),
    }
    spec = model_spec(adapter.model, model_id="direct-bench")
    kinds = {method.kind for method in METHODS}
    size_bytes = tokens * sum(each.row_bytes + 64 for each in spec.streams if each.stream.kind in kinds)
    with (
        embedded_store(3 * size_bytes // 4096 * 4096 + 64 * _MIB, directory) as running,
        ctxcache.connect(running.ready.target) as client,
        Pipeline(device_of(where)) as pipeline,
    ):
        bed, found = Bed(adapter, client, pipeline), ways(client, where)
        for method in METHODS:
            for row in measured(bed, found, method, tokens, rounds):
                if as_json:
                    print(json.dumps({**facts, **row}), flush=True)
                else:
                    cost = "" if row["verifying"] is None else f", verifying {row['verifying']:+.1%}"
                    print(
                        f"{row['rows']:7} {row['way']:28} {row['median_s'] * 1e3:8.1f} ms "
                        f" {row['of_store']:.2f} of the store{cost}"
                    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except CacheError as error:
        raise SystemExit(str(error)) from error

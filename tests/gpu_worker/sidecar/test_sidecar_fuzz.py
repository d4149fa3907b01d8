"""Fuzz of a worker beside an engine: whatever a message says, it is answered with a reason, and nothing ends.

A long run: `CTXCACHE_FUZZ=50000 .venv/bin/python -m pytest --timeout 7200 tests/gpu_worker/sidecar -k fuzz`.
"""

import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from attached import BLOCKS, Case, saved_case
from paged_engine import PROMPT_TOKENS, WORKER_DEVICE
from server_process import ServerProcess
from worker_process import UNCHECKED, WorkerProcess

from gpu_worker.sidecar.client import WorkerClient
from gpu_worker.v1 import worker_pb2
from tests.faults.messages import MessageMaker, Plausible, mutate

COUNT = int(os.environ.get("CTXCACHE_FUZZ", "1500"))
CALL_S = 30.0
SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)


class Fuzz:
    """Messages to every rpc, some of them nearly right."""

    def __init__(self, path: Path, case: Case, seed: int) -> None:
        self._draw = random.Random(seed)
        plausible = Plausible([case.session, "sessions/none"], ["models/llama"], [bytes(32)])
        self._maker = MessageMaker(self._draw, plausible)
        self._channel: Any = grpc.insecure_channel(
            f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        attachment = case.attached.attachment_id
        self._right: dict[str, Any] = {
            "Restore": worker_pb2.RestoreRequest(
                attachment_id=attachment,
                session=case.session,
                block_ids=BLOCKS,
                token_end=PROMPT_TOKENS,
                token_ids=case.token_ids,
            ),
            "Save": worker_pb2.SaveRequest(attachment_id=attachment, session=case.session, token_count=1),
            "Plan": worker_pb2.PlanRequest(attachment_id=attachment, token_count=16),
            "Cancel": worker_pb2.CancelRequest(attachment_id=attachment, restore_id="x"),
            "Profile": worker_pb2.ProfileRequest(attachment_id=attachment),
        }
        self.answers: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self, count: int) -> None:
        """So many messages, one after the other."""
        with self._channel:
            for number in range(count):
                method = self._draw.choice(SERVICE.methods)
                encoded = self._message(method.name, number)
                try:
                    self._call(method.name, encoded)
                    self.answers["OK"] += 1
                except grpc.RpcError as error:
                    self.answers[error.code().name] += 1
                    metadata: Any = error.trailing_metadata() or ()
                    has_reason = any("status-details" in key for key, _ in metadata)
                    if error.code() in NEVER or not has_reason:
                        self.problems.append(
                            f"{method.name} {encoded[:200].hex()}: {error.code()} {error.details()}"
                        )

    def _message(self, name: str, number: int) -> bytes:
        right = self._right.get(name)
        if right is None or self._draw.random() < 0.4:
            return self._maker.encoded(SERVICE.methods_by_name[name].input_type)
        # A right one with other fields merged into it, by appending them, or with bytes changed.
        made = type(right)()
        made.CopyFrom(right)
        if name == "Restore":
            made.restore_id = f"fuzz-{number}"
        encoded = made.SerializeToString()
        if self._draw.random() < 0.5:
            other = self._maker.message(made.DESCRIPTOR)
            for field in made.DESCRIPTOR.fields:
                if self._draw.random() < 0.7 or field.name == "attachment_id":
                    other.ClearField(field.name)
            return bytes(encoded + other.SerializeToString())
        return mutate(self._draw, encoded) if self._draw.random() < 0.7 else bytes(encoded)

    def _call(self, name: str, encoded: bytes) -> None:
        path = f"/{SERVICE.full_name}/{name}"
        method = SERVICE.methods_by_name[name]
        if method.client_streaming:
            list(self._channel.stream_stream(path)(iter([encoded]), timeout=CALL_S))
        elif method.server_streaming:
            list(self._channel.unary_stream(path)(encoded, timeout=CALL_S))
        else:
            self._channel.unary_unary(path)(encoded, timeout=CALL_S)


def test_fuzz_of_every_rpc(
    worker: WorkerProcess, client: WorkerClient, weights: Path, session_id: str
) -> None:
    """An engine that is attached restores its session afterwards as before."""
    with saved_case(client, weights, session_id) as case:
        fuzz = Fuzz(worker.path, case, 1)
        fuzz.run(COUNT)
        sys.stdout.write(f"{sum(fuzz.answers.values())} messages: {dict(fuzz.answers)}\n")
        assert fuzz.problems == [], "\n".join(fuzz.problems[:20])
        assert worker.process.poll() is None
        case.engine.poison()
        assert case.restore().is_restored
        assert case.is_as_saved()


def test_fuzz_finds_an_error_that_has_no_reason(
    store: ServerProcess, weights: Path, session_id: str, tmp_path: Path
) -> None:
    """A worker with a bug: some message meets it."""
    options = ("--device", WORKER_DEVICE, "--directory", "/nonexistent")
    with (
        WorkerProcess(tmp_path, store.target, *options, entry=UNCHECKED) as worker,
        WorkerClient(worker.path) as client,
        saved_case(client, weights, session_id) as case,
    ):
        fuzz = Fuzz(worker.path, case, 1)
        fuzz.run(100)
        assert any("INTERNAL" in problem for problem in fuzz.problems)

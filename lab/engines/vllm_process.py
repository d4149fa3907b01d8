"""vLLM in a process of its own: requests in by a line of JSON, replies out by another.

    python -m lab.engines.vllm_process MODEL OPTIONS

OPTIONS is a JSON object of arguments of `vllm.LLM`. The first line out is `{"ready": true}`, each later one
answers one line in: a list of requests, which the engine gets together.
"""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where vLLM keeps it
LINK_TIMEOUT_S = 60.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
    # Latencies come with replies only where statistics are kept.
    "disable_log_stats": False,
}


@dataclass(frozen=True, slots=True)
class Reply:
    """The engine's answer to one request. `cached_count`: tokens of the prompt that were not computed.

    `took_s`: from the request's arrival to the reply's first token.
    """

    token_ids: tuple[int, ...]
    cached_count: int
    finish_reason: str
    took_s: float


class VllmEngine:
    """A running engine. A context manager."""

    def __init__(
        self,
        model: Path,
        target: str | None,
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`target`: of the store it uses, if it uses one. `options` are arguments of `vllm.LLM`."""
        arguments = DEFAULTS | options
        if target is not None:
            extra = {"target": target, "model_id": "tiny"} | arguments.pop("extra", {})
            arguments["kv_transfer_config"] = {
                "kv_connector": "CtxcacheConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        transfer = arguments.get("kv_transfer_config")
        self._id = str(uuid.uuid4())
        if transfer is not None:
            arguments["kv_transfer_config"] = {"engine_id": self._id} | transfer
        self._command = [sys.executable, "-m", __spec__.name, str(model), json.dumps(arguments)]
        self._log = log
        self._environment = os.environ | ENVIRONMENT | dict(environment or {})

    @property
    def log(self) -> str:
        """All that it wrote to standard error."""
        return self._log.read_text()

    def __enter__(self) -> Self:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own command
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("both are pipes")
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.close()
        self._process.wait(60)
        self._replies.close()
        # vLLM leaves the host memory that it offloads to.
        for left in SHARED_MEMORY.glob(f"vllm_offload_{self._id}*"):
            left.unlink()

    def kill(self) -> None:
        """Kill it where it stands."""
        self._process.kill()

    def ask(self, *requests: Mapping[str, Any]) -> list[Reply]:
        """Send requests together and wait for their replies, in their order.

        A request has `prompt` (token ids), `session` (an id, or None), `count` (tokens to generate), and
        perhaps a `salt`, `hints` (an envelope of vLLM's), and `says` (further `kv_transfer_params`).
        """
        self._requests.write(json.dumps(requests) + "\n")
        self._requests.flush()
        return [Reply(tuple(item.pop("token_ids")), **item) for item in self._read()]

    def turn(self, prompt: Sequence[int], session: str | None, count: int = 24) -> Reply:
        """One request and its reply."""
        return self.ask({"prompt": list(prompt), "session": session, "count": count})[0]

    def metrics(self, name: str) -> dict[str, float]:
        """Counters of vLLM of that name, by their labels but for the model's and the engine's."""
        self._requests.write(json.dumps({"metrics": name}) + "\n")
        self._requests.flush()
        found: dict[str, float] = self._read()
        return found

    def _read(self) -> Any:
        line = self._replies.readline()
        if not line:
            raise RuntimeError(f"vLLM ended: {self.log[-4000:]}")
        return json.loads(line)


def serve(model: str, arguments: dict[str, Any]) -> None:
    """Answer requests from standard input until it ends."""
    # Whatever libraries print must not come between the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import msgspec  # noqa: PLC0415  vLLM's
    from vllm import LLM, SamplingParams  # noqa: PLC0415  it prints
    from vllm.config import KVEventsConfig, KVTransferConfig  # noqa: PLC0415
    from vllm.distributed.kv_transfer import (  # noqa: PLC0415
        get_kv_transfer_group,
        has_kv_transfer_group,
    )
    from vllm.v1.kv_hints import KvHintsEnvelope  # noqa: PLC0415

    transfer = arguments.pop("kv_transfer_config", None)
    if transfer is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    if "kv_events_config" in arguments:
        arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
    llm: Any = LLM(model=model, **arguments)
    if transfer is not None and transfer["kv_connector"].startswith("Ctxcache"):
        # An engine in a process of its own is asked by requests alone.
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        connectors = [core.scheduler.connector] if core is not None else []
        # Each of several ranks is a process of its own.
        connectors += [get_kv_transfer_group()] if has_kv_transfer_group() else []
        for connector in connectors:
            connector.wait_until_linked(LINK_TIMEOUT_S)

    def say(what: object) -> None:
        replies.write(json.dumps(what) + "\n")
        replies.flush()

    add_request: Any = llm.llm_engine.add_request
    hints: list[KvHintsEnvelope | None] = []
    llm.llm_engine.add_request = lambda *args, **named: add_request(*args, **named, kv_hints=hints.pop(0))
    say({"ready": True})
    for line in sys.stdin:
        requests = json.loads(line)
        if isinstance(requests, dict):
            counters = [one for one in llm.get_metrics() if one.name == requests["metrics"]]
            say({_labels(one.labels): one.value for one in counters})
            continue
        hints += [
            msgspec.convert(request["hints"], KvHintsEnvelope) if request.get("hints") else None
            for request in requests
        ]
        outputs = llm.generate(
            [
                {"prompt_token_ids": request["prompt"], "cache_salt": request.get("salt")}
                for request in requests
            ],
            [
                SamplingParams(
                    max_tokens=request["count"],
                    temperature=0,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={
                        "kv_transfer_params": {"session_id": request["session"]} | request.get("says", {})
                    },
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        say(
            [
                {
                    "token_ids": list(output.outputs[0].token_ids),
                    "cached_count": output.num_cached_tokens or 0,
                    "finish_reason": output.outputs[0].finish_reason,
                    "took_s": output.metrics.first_token_latency if output.metrics else 0.0,
                }
                for output in outputs
            ]
        )


def _labels(labels: Mapping[str, str]) -> str:
    return "/".join(labels[name] for name in sorted(labels.keys() - {"engine", "model_name"}))


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))

"""vLLM in a process of its own, which gets lists of requests and answers each with a list of replies.

Engines are forked from a process that has vLLM imported, which takes as long as all else of a start. One that
needs an environment of its own is started anew. Worst case: it ends, which is a RuntimeError with the end of
its log.
"""

import atexit
import importlib
import importlib.util
import multiprocessing
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where vLLM keeps it
LINK_TIMEOUT_S = 60.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    # Blocks that one process leaves are found by another under the same hashes.
    "PYTHONHASHSEED": "0",
}
IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "gpu_worker.engines.vllm.connector",
    "gpu_worker.engines.vllm.offloading",
)
"""By the process that forks."""
END_S = 60.0
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

    `took_s`: from the request's arrival to the reply's first token. `says`: its `kv_transfer_params`.
    """

    token_ids: tuple[int, ...]
    cached_count: int
    finish_reason: str
    took_s: float
    says: Mapping[str, Any] | None = None


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
        """`target`: of the store it uses, if it uses one. `options` are arguments of `vllm.LLM`.

        One of them is ours: `packages`, a directory of packages that the engine finds behind its own.
        """
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
        self._arguments = str(model), arguments
        self._log = log
        self._environment = dict(environment or {})

    @property
    def log(self) -> str:
        """All that it wrote to standard error."""
        return self._log.read_text()

    def __enter__(self) -> Self:
        # Libraries read their variables when they are imported.
        started = SpawnProcess if self._environment else ForkServerProcess
        self._connection, other = multiprocessing.Pipe()
        with other, _environment(ENVIRONMENT | self._environment):
            multiprocessing.set_forkserver_preload([*IMPORTED])
            self._process = started(target=run, args=(other, str(self._log), *self._arguments))
            self._process.start()
        self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._process.join(END_S)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"vLLM does not end: {self.log[-4000:]}")
        # vLLM leaves the host memory that it offloads to.
        for left in SHARED_MEMORY.glob(f"vllm_offload_{self._id}*"):
            left.unlink()

    def kill(self) -> None:
        """Kill it where it stands."""
        self._process.kill()

    def ask(self, *requests: Mapping[str, Any]) -> list[Reply]:
        """Send requests together and wait for their replies, in their order.

        A request has `prompt` (token ids), `session` (an id, or None), `count` (tokens to generate), and
        perhaps a `salt`, `hints` (an envelope of vLLM's), `says` (further `kv_transfer_params`),
        `adapter` (the fields of a LoRARequest), and `embeds`: an input [T, D] for each token, which stands
        in for those whose ids are 0.
        """
        replies: list[Reply] = self._answer([*requests])
        return replies

    def turn(self, prompt: Sequence[int], session: str | None, count: int = 24) -> Reply:
        """One request and its reply."""
        return self.ask({"prompt": list(prompt), "session": session, "count": count})[0]

    def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """The result of a function of a module, called in the engine's process with `vllm.LLM` and these."""
        return self._answer((function, arguments))

    def metrics(self, name: str) -> dict[str, float]:
        """Counters of vLLM of that name, by their labels but for the model's and the engine's."""
        found: dict[str, float] = self._answer(name)
        return found

    def _answer(self, asked: object) -> Any:
        try:
            self._connection.send(asked)
        except OSError:
            raise RuntimeError(f"vLLM ended: {self.log[-4000:]}") from None
        return self._read()

    def _read(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            # Its last words are in the log when it has ended.
            self._process.join(END_S)
            raise RuntimeError(f"vLLM ended: {self.log[-4000:]}") from None


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """Give processes that are started within it these variables."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run(asking: Connection, log: str, model: str, arguments: dict[str, Any]) -> None:
    """Be an engine until nobody asks any more. What it prints goes to the log."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(file, standard)
    # Modules are looked for where the asking process looks, and not where variables say.
    sys.path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    serve(asking, model, arguments)
    # A forked process ends without.
    atexit._run_exitfuncs()  # noqa: SLF001  there is no other way


def serve(asking: Connection, model: str, arguments: dict[str, Any]) -> None:
    """Answer requests until nobody asks any more."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415  it prints
    from vllm.config import KVEventsConfig, KVTransferConfig  # noqa: PLC0415
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    if "packages" in arguments:
        sys.path.append(arguments.pop("packages"))
        _bear_cffi()
    transfer = arguments.pop("kv_transfer_config", None)
    if transfer is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    if "kv_events_config" in arguments:
        arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
    llm: Any = LLM(model=model, **arguments)
    for connector in _connectors(llm) if transfer is not None else ():
        if hasattr(connector, "wait_until_linked"):
            connector.wait_until_linked(LINK_TIMEOUT_S)

    hints: list[Any] = []
    _give_hints(llm, hints)
    asking.send(None)
    while True:
        try:
            requests = asking.recv()
        except EOFError:
            return
        if isinstance(requests, tuple):
            function, more = requests
            asking.send(function(llm, *more))
            continue
        if isinstance(requests, str):
            counters = [one for one in llm.get_metrics() if one.name == requests]
            asking.send({_labels(one.labels): one.value for one in counters})
            continue
        hints += [request.get("hints") for request in requests]
        outputs = llm.generate(
            [
                {"prompt_token_ids": request["prompt"], "cache_salt": request.get("salt")}
                | (
                    {
                        "prompt_embeds": request["embeds"],
                        "prompt_is_token_ids": [token > 0 for token in request["prompt"]],
                    }
                    if "embeds" in request
                    else {}
                )
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
            lora_request=[
                LoRARequest(**request["adapter"]) if request.get("adapter") else None for request in requests
            ],
            use_tqdm=False,
        )
        asking.send(
            [
                Reply(
                    token_ids=tuple(output.outputs[0].token_ids),
                    cached_count=output.num_cached_tokens or 0,
                    finish_reason=output.outputs[0].finish_reason,
                    took_s=output.metrics.first_token_latency if output.metrics else 0.0,
                    says=output.kv_transfer_params,
                )
                for output in outputs
            ]
        )


def _give_hints(llm: Any, hints: list[Any]) -> None:
    """Let each request that `vllm.LLM` adds have the next of these hints, where vLLM takes any."""
    from gpu_worker.engines.vllm.versions import has  # noqa: PLC0415  it needs vLLM

    if not has("hints"):
        return
    import msgspec  # noqa: PLC0415  vLLM's
    from vllm.v1.kv_hints import KvHintsEnvelope  # noqa: PLC0415  not on every version

    add_request: Any = llm.llm_engine.add_request

    def add(*args: Any, **named: Any) -> Any:
        # Requests that a called function adds have none.
        hint = hints.pop(0) if hints else None
        envelope = msgspec.convert(hint, KvHintsEnvelope) if hint else None
        return add_request(*args, **named, kv_hints=envelope)

    llm.llm_engine.add_request = add


def _bear_cffi() -> None:
    """Let vLLM's dispatcher, where it has one, bear libraries of cffi: it looks at all that modules have."""
    if importlib.util.find_spec("vllm.triton_utils.dispatcher"):
        dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
        dispatcher.vars = lambda value: found if isinstance(found := vars(value), dict) else {}


def _connectors(llm: Any) -> Iterator[Any]:
    """Those of this process, each by itself."""
    from vllm.distributed.kv_transfer import (  # noqa: PLC0415
        get_kv_transfer_group,
        has_kv_transfer_group,
    )

    # An engine in a process of its own is asked by requests alone.
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    sides = [core.scheduler.connector] if core is not None else []
    # Each of several ranks is a process of its own.
    sides += [get_kv_transfer_group()] if has_kv_transfer_group() else []
    for side in sides:
        yield from getattr(side, "sub_connectors", [side])


def _labels(labels: Mapping[str, str]) -> str:
    return "/".join(labels[name] for name in sorted(labels.keys() - {"engine", "model_name"}))

"""Requests of any content against what vLLM's scheduler calls: no call of a connector raises.

    .venv-vllm/bin/python -m tests.engines.vllm_contents --requests 200000
    .venv-vllm/bin/python -m tests.engines.vllm_contents --control door_open

An error out of one of these calls ends the engine for everybody. Both connectors are asked in the order in
which vLLM's scheduler asks them, on a real store, without an engine. Names, salts, hints, parameters, ids and
priorities are of any type, size, depth and script; a share of them is right but for one place. After all of
them a conversation is still looked up, and every line that was logged can be written.

Run with some thousand requests by `make engines`. Worst case: a call that hangs, which is a finding.
"""

import argparse
import importlib
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

import ctxcache
from gpu_worker.engines.names import session_id
from gpu_worker.engines.vllm import connector as connectors
from gpu_worker.engines.vllm import said
from gpu_worker.engines.vllm.handover import KEY
from gpu_worker.engines.vllm.offloading import CtxcacheOffloadingConnector
from gpu_worker.engines.vllm.plan import BlockLayout
from lab.engines.families import SHAPE
from tests.faults.harness import Harness, Report, progress
from tests.server_process import ServerProcess

REQUESTS = int(os.environ.get("CTXCACHE_CONTENTS", "4000"))
"""How many a test makes."""
BLOCK_TOKENS = 32
ASKS = 2000
"""How often vLLM asks again for a look-up, before that is a finding."""
LINK_S = 60.0
LOOKED_UP = 50
"""Of so many requests one has a prompt, is looked up, and has its session made."""
SHOWN = 300
MODULES = [f"gpu_worker.engines.vllm.{name}" for name in ("scheduler", "offloading", "said")]
"""Those that a bug is planted in."""
DOOR_OPEN, PARAMETERS_UNCHECKED = "door_open", "parameters_unchecked"
WORDS = (
    "",
    " ",
    "alice",
    "alice@example.com",
    "/a/b",
    "x" * 128,
    "x" * 129,
    "x" * 100_000,
    "\0",
    "a\nb",
    "\ud800",
    "\udfff\ud800",
    "a\u0301",
    "\u202e\u200b\ufeff",
    "会話" * 50,
    "sha256:" + "0" * 64,
    "alice.rank1",
    "%s %d {} {0}",
    "1e400",
    "../../etc",
    "sessions/alice",
)
NUMBERS = (
    0,
    1,
    -1,
    True,
    7,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**400,
    0.0,
    -0.0,
    0.5,
    1e-320,
)
LARGE = (1e9, 8.64e13, 1e15, 1.7e18, 1e308, float("inf"), float("-inf"), float("nan"))
"""Among them a time in nanoseconds where a span in seconds is meant."""
COUNTS = ("token_count", "rank_count")
KEYS = ("session_id", "ends", "kv_hints", "actions", "payload", "max_load_tokens", "kv_load_tiers", "medium")
KINDS = ("pin", "retain", "prefetch", "demote", "share", "release", "expect", "another", "")
FIELDS = ("session", "token_count", "ttl_s", "priority", "budget_bytes", "return_in_s", "ended", "other")


class Caller:
    """Makes requests' words."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def any(self, depth: int = 0) -> Any:
        """Anything."""
        pick = self._draw.random()
        if pick < 0.6:
            return self.word() if pick < 0.35 else self._draw.choice(NUMBERS + LARGE)
        if depth > 3 or pick < 0.75:
            return self._draw.choice(
                [None, b"\xff\0", (), frozenset({1}), object(), 1j, [], {}, [[]], type, ...]
            )
        if pick < 0.76:
            return self._deep()
        if pick < 0.88:
            return [self.any(depth + 1) for _ in range(self._draw.randrange(4))]
        keys = [self.key(self._draw.choice([*KEYS, *FIELDS])) for _ in range(self._draw.randrange(5))]
        return {key: self.any(depth + 1) for key in keys}

    def key(self, right: str) -> Any:
        """A key of a mapping."""
        return right if self._draw.random() < 0.95 else self._draw.choice([self.word(), None, 1, 0.5, b"k"])

    def word(self) -> str:
        """A text."""
        if self._draw.random() < 0.7:
            return self._draw.choice(WORDS)
        alphabet = self._draw.choice(["ab.:_-/@ ", "éüß漢字🙂", "\ud800\udc00\0\n"])
        return "".join(self._draw.choices(alphabet, k=self._draw.randrange(200)))

    def _deep(self) -> Any:
        deep: Any = {}
        for _ in range(self._draw.choice([100, 3000])):
            deep = self._draw.choice([[deep], {"kv_hints": deep}])
        return deep

    def perhaps(self, right: Any, share: float = 0.85) -> Any:
        """What is right, or anything."""
        return right if self._draw.random() < share else self.any()

    def hints(self) -> Any:
        """An envelope, right but for some places."""
        actions = [
            self.perhaps(
                {
                    "action_id": self.perhaps("1"),
                    "action_type": self.perhaps(self._draw.choice(KINDS)),
                    "action_version": self.perhaps("1"),
                    "payload": self.perhaps(
                        {
                            self.key(name): self.perhaps(self._payload(name), 0.7)
                            for name in FIELDS
                            if self._draw.random() < 0.3
                        }
                    ),
                },
                0.95,
            )
            for _ in range(self._draw.choice([0, 1, 2, 3, 40]))
        ]
        envelope = {
            "protocol_version": self.perhaps("1"),
            "message_id": self.perhaps("m"),
            "actions": self.perhaps(actions, 0.95),
        }
        return self.perhaps(envelope, 0.9)

    def _payload(self, name: str) -> Any:
        if name == "session":
            return self.word()
        if name == "ended":
            return self._draw.random() < 0.5
        return self._draw.choice(NUMBERS + LARGE)

    def _hand_over(self) -> Any:
        """What another engine says of a prompt, right but for some places."""
        counts = {name: self.perhaps(self._draw.choice([1, 96, 1 << 70])) for name in COUNTS}
        return self.perhaps({"session_name": self.perhaps("sessions/another")} | counts)

    def parameters(self) -> Any:
        """`kv_transfer_params`."""
        right = {
            self.key(name): value
            for name, value in (
                ("session_id", self.perhaps(self.word(), 0.7)),
                ("ends", self.perhaps(self._draw.random() < 0.9)),
                ("do_remote_decode", self.perhaps(self._draw.random() < 0.5)),
                (f"{KEY}{self._draw.choice(['', 'here', 'there'])}", self._hand_over()),
                ("kv_hints", self.hints()),
                ("max_load_tokens", self.any()),
                ("max_offload_tokens", self.any()),
                (
                    "kv_load_tiers",
                    self.perhaps([self.perhaps({"medium": self.any(), "locality": self.any()})]),
                ),
                ("do_remote_prefill", self.any()),
                ("another", self.any()),
            )
            if self._draw.random() < 0.4
        }
        return self.perhaps(right, 0.8)

    def request(self, number: int) -> Request:
        """A request as vLLM's engine makes it of what came over the network, or in process."""
        count = self._draw.choice([1, 64, 97]) if number % LOOKED_UP == 0 else 0
        # Of vLLM's own checks nothing is taken for granted but that it has a prompt of token ids.
        request = Request(
            f"{number}",
            [self._draw.randrange(500) for _ in range(count)],
            SamplingParams(max_tokens=self._draw.choice([1, 64]), detokenize=False),
            None,
            priority=self._draw.choice([0, 0, 0, 1, -(2**63), 2**63 - 1]),
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256) if count else None,
        )
        request.request_id = self._draw.choice([f"{number}", f"{number}-{self.word()}"])
        request.kv_transfer_params = self.parameters() if self._draw.random() < 0.8 else None
        request.session_id = self.perhaps(self._draw.choice([None, self.word()]), 0.8)
        request.cache_salt = self.perhaps(self._draw.choice([None, None, self.word()]), 0.9)
        request.kv_hints = self.hints() if self._draw.random() < 0.3 else None
        return request


def blocks_for(request: Request) -> KVCacheBlocks:
    """Blocks for all tokens of a request."""
    count = -(-request.num_tokens // BLOCK_TOKENS)
    return KVCacheBlocks(([KVCacheBlock(1 + i) for i in range(count)],))


class Engine:
    """Both connectors as the scheduler has them, on a real store."""

    def __init__(self, model: Path, store: ServerProcess) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(SHAPE["num_hidden_layers"])]
        caches = KVCacheConfig(64, [], [KVCacheGroupSpec(names, spec)])
        layout = BlockLayout((spec.page_size_bytes // BLOCK_TOKENS,) * len(names), "none")
        init_none_hash(sha256)
        self.connectors: dict[str, KVConnectorBase_V1] = {}
        self._blocks = KVCacheBlocks(([],))
        self.block_pool = None
        """Of the scheduler's manager of blocks, which this stands for."""
        offloading = {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "lab.engines.offload_on_cpu",
            "cpu_bytes_to_use": 64 << 20,
        }
        for kind, extra in (
            (connectors.CtxcacheConnector, {}),
            (CtxcacheOffloadingConnector, offloading),
        ):
            config = EngineArgs(
                model=str(model),
                skip_tokenizer_init=True,
                dtype="float32",
                block_size=BLOCK_TOKENS,
                kv_transfer_config=KVTransferConfig(
                    kv_connector=kind.__name__,
                    kv_role="kv_both",
                    kv_connector_extra_config={"target": store.target, "timeout_s": 30.0, **extra},
                ),
            ).create_engine_config()
            made: Any = kind(config, KVConnectorRole.SCHEDULER, caches)
            made.bind_kv_cache_manager(self)
            made.set_xfer_handshake_metadata_pp_aware({(0, 0): layout})
            self.connectors[kind.__name__] = made
            if not made.wait_until_linked(LINK_S):
                raise TimeoutError(f"{kind.__name__} has no link")

    def get_blocks(self, _request_id: str) -> KVCacheBlocks:
        """The blocks of the only request, as the scheduler's manager of blocks says them."""
        return self._blocks

    def reset_prefix_cache(self) -> bool:
        """As the scheduler's manager of blocks: nothing is cached."""
        return True

    def close(self) -> None:
        """End them."""
        for one in self.connectors.values():
            one.shutdown()

    def run(self, connector: KVConnectorBase_V1, request: Request) -> None:
        """The life of a request, as the scheduler sees it. Raises whatever a call does."""
        connector.on_new_request(request)
        # The scheduler's own next line.
        if request.kv_transfer_params:
            request.kv_transfer_params.get("do_remote_prefill")
        self._blocks = blocks_for(request)
        count: int | None = None
        for _ in range(ASKS if request.num_tokens else 0):
            count, _ = connector.get_num_new_matched_tokens(request, 0)
            if count is not None:
                break
            connector.build_connector_meta(SchedulerOutput.make_empty())
        else:
            if request.num_tokens:
                raise TimeoutError("asked for ever")
        output = SchedulerOutput.make_empty()
        if request.num_tokens:
            # Nothing is loaded: no worker is there to do it.
            connector.update_state_after_alloc(request, self._blocks, 0)
            ids = self._blocks.get_block_ids()
            output.scheduled_new_reqs.append(NewRequestData.from_request(request, ids))
            output.num_scheduled_tokens[request.request_id] = request.num_tokens
            output.total_num_scheduled_tokens = request.num_tokens
        connector.build_connector_meta(output)
        request.status = RequestStatus.FINISHED_ABORTED
        cast("Any", connector).request_finished_all_groups(request, ([],))
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {request.request_id}
        connector.build_connector_meta(output)
        cast("Any", connector).get_kv_connector_stats()


class Lines(logging.Handler):
    """Writes every line that is logged to nowhere, as a handler would: one that cannot be is a finding."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """See the class."""
        self._report.count("line_count")
        # vLLM's own may be of any length.
        if "ctxcache" not in record.name and "gpu_worker" not in record.name:
            return
        try:
            if len(self.format(record).splitlines()[0]) > 10 * SHOWN:
                self._report.find(f"a line of {len(self.format(record))} characters: {record.msg!r}")
        except Exception as error:  # noqa: BLE001  what a line cannot be written for
            self._report.find(f"a line is not written: {record.msg!r}: {error!r}")
        if "words are not understood" in str(record.msg):
            self._report.count("guarded_count")


@contextmanager
def _planted(control: str | None) -> Iterator[None]:
    scheduler, offloading, door = map(importlib.import_module, MODULES)
    before = [
        (scheduler, "read", scheduler.read),
        (offloading, "check_parameters", offloading.check_parameters),
    ]
    if control == DOOR_OPEN:

        def unguarded(request: Request, teller: Any, labels: Any, _target: str) -> said.Said:
            said.check_parameters(request)
            hints = tuple(door.hints_of(request, teller))
            own = door._labels_of(request, labels)
            salt = door._salt_of(request)
            return said.Said(
                door._session_of(request), salt, own, hints, handed=None, is_prefill=False, source=""
            )

        vars(scheduler)["read"] = unguarded
    elif control == PARAMETERS_UNCHECKED:
        vars(offloading)["check_parameters"] = lambda _request: None
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    caller = Caller(random.Random(options.seed))
    lines = Lines(report)
    loggers = [logging.getLogger("vllm"), logging.getLogger("gpu_worker")]
    with (
        tempfile.TemporaryDirectory(prefix="ctxcache-contents-") as folder,
        ServerProcess(Path(folder) / "data") as store,
        _planted(options.control),
    ):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(Path(folder) / "tiny")
        engine = Engine(Path(folder) / "tiny", store)
        kept = [(one, one.handlers[:], one.propagate) for one in loggers]
        for one in loggers:
            one.handlers, one.propagate = [lines], False
        try:
            for number in range(options.requests):
                _one(engine, caller, number, report)
                report.end_if_found()
                progress(number + 1, options.requests, "requests")
            for word in ("alice", "bob@example.com"):
                _is_used(engine, store, word, report)
        finally:
            for one, handlers, propagate in kept:
                one.handlers, one.propagate = handlers, propagate
            engine.close()


def _one(engine: Engine, caller: Caller, number: int, report: Report) -> None:
    state = caller._draw.getstate()
    for name, connector in engine.connectors.items():
        # Each of them gets the same words: a connector may change a request.
        caller._draw.setstate(state)
        request = caller.request(number)
        shown = [request.kv_transfer_params, request.session_id, request.cache_salt, request.kv_hints]
        report.count("request_count")
        try:
            engine.run(connector, request)
        except Exception as error:  # noqa: BLE001  the finding itself
            report.find(f"{name}, {type(error).__name__}: {error}: {_text(shown)}"[: 2 * SHOWN])


def _text(value: Any) -> str:
    try:
        return ascii(value)[:SHOWN]
    except (RecursionError, ValueError) as error:
        return f"content of {type(error).__name__}"


def _is_used(engine: Engine, store: ServerProcess, word: str, report: Report) -> None:
    """Behind all of it, a conversation is looked up and made."""
    request = Request(f"last {word}", [*range(3, 100)], SamplingParams(max_tokens=1), None, session_id=word)
    request.kv_transfer_params = {"session_id": word}
    engine.run(engine.connectors["CtxcacheConnector"], request)
    with ctxcache.connect(store.target) as cache:
        names = {one.name for one in cache.sessions.list()}
    if f"sessions/{session_id(word)}" not in names:
        report.find(f"{word} is not looked up any more, behind requests of all sorts")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2000, help="a long run has 200000")


HARNESS = Harness(
    "vllm_contents",
    "Gives requests of any content to what vLLM's scheduler calls of both connectors.",
    run,
    {
        DOOR_OPEN: "what a request says is read without a guard",
        PARAMETERS_UNCHECKED: "the offloading connector hands parameters of any type to vLLM",
    },
    _options,
    package="tests.engines",
)


@pytest.mark.timeout(600)
def test_no_content_raises() -> None:
    """Out of no call, of neither connector."""
    report = HARNESS.execute(["--requests", str(REQUESTS)])
    assert report.is_good, report


@pytest.mark.timeout(300)
@pytest.mark.parametrize("control", sorted(HARNESS.controls))
def test_a_planted_bug_is_found(control: str) -> None:
    """A door that is left open is found."""
    report = HARNESS.execute(["--requests", "2000", "--control", control])
    assert report.is_good, report


if __name__ == "__main__":
    sys.exit(HARNESS.main())

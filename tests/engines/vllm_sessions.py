"""Sessions in a real vLLM: replies are those of an engine without a store, whatever happens to the store.

Run by `make engines`, in an environment that has vLLM. Each reply is compared token for token with that of
the same model in an engine that computes every prompt. Tests that leave the store as it is share one store
and one engine for each kind of state, and no session and no prompt.
"""

import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

import ctxcache
from ctxcache.client import Client
from ctxcache.client.types import StorageTier
from gpu_worker.engines.link import LinkState
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.vllm import scheduler
from gpu_worker.engines.vllm.plan import BlockLayout
from gpu_worker.engines.vllm.settings import ConnectorSettings
from gpu_worker.model.spec import describe_directory
from gpu_worker.planning.plan import Method, RestorePlan
from lab.engines.families import SHAPE
from lab.engines.vllm_process import Reply, VllmEngine
from tests.engines.stalling_proxy import StallingProxy
from tests.server_process import ServerProcess

BLOCK_TOKENS = 32
COUNT = 24
HANG_S = 10.0
QUESTION = 20
SLOW_COPIES = """
import sys, time
from gpu_worker.saving import staging
copy = staging.HostCopies.copy
def slowly(self, target, rows):
    time.sleep(0.03)
    copy(self, target, rows)
    sys.stderr.write("copied slowly\\n")
staging.HostCopies.copy = slowly
"""
SLOW_SESSIONS = """
import sys, time
from ctxcache.client.sessions import SessionCalls
create = SessionCalls.create
def slowly(self, *arguments, **named):
    time.sleep(0.05)
    made = create(self, *arguments, **named)
    sys.stderr.write("made slowly\\n")
    return made
SessionCalls.create = slowly
"""
_MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, in files: a Llama, unless a test names a family."""
    torch.manual_seed(0)
    family = getattr(request, "param", "llama")
    config, build = _MODELS[family]
    directory = tmp_path_factory.mktemp("models") / f"tiny-{family}"
    build(config(**SHAPE)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine that has no store and keeps nothing between requests."""
    with VllmEngine(model, None, tmp_path_factory.mktemp("plain") / "log") as engine:
        yield engine


@pytest.fixture(scope="module", params=["blocks", "kv", "hidden"])
def state(request: pytest.FixtureRequest) -> str:
    """The kind of state that is saved, as the connector's setting names it."""
    return str(request.param)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store that a test may do anything to."""
    with ServerProcess(tmp_path / "data") as server:
        yield server


@pytest.fixture
def engine(model: Path, state: str, store: ServerProcess, tmp_path: Path) -> Iterator[VllmEngine]:
    """An engine with that store."""
    with VllmEngine(model, store.target, tmp_path / "log", extra={"state": state}) as running:
        yield running


@pytest.fixture(scope="module")
def shared_engine(model: Path, state: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine and a store for all tests that only hold conversations."""
    place = tmp_path_factory.mktemp("shared")
    with (
        ServerProcess(place / "data") as server,
        VllmEngine(model, server.target, place / "log", extra={"state": state}) as running,
    ):
        yield running


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A session that no other test has."""
    return "-".join(part for part in re.split(r"\W+", request.node.name) if part)


def asked(turn: int) -> list[int]:
    """The words of a user in a turn."""
    return [(7 * turn + 3 * i) % 500 + 3 for i in range(QUESTION)]


def opening(number: int) -> list[int]:
    """The first prompt of a conversation: another one for each."""
    return [(11 * number + 5 * i * i) % 500 + 3 for i in range(97)]


def whole_blocks(token_count: int) -> int:
    """Tokens of a prompt that whole blocks hold, its last one left to be computed."""
    return (token_count - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def compare(reply: Reply, prompt: Sequence[int], plain: VllmEngine) -> None:
    """The reply is the one that is computed from nothing."""
    assert reply.finish_reason == "length"
    assert reply.token_ids == plain.turn(prompt, None, COUNT).token_ids


def wait_for(client: Client, name: str, token_count: int) -> None:
    """Wait until a session's tokens are durable."""
    deadline_s = time.monotonic() + 30
    while client.sessions.get(name).durable_token_count < token_count:
        assert time.monotonic() < deadline_s, client.sessions.get(name)
        time.sleep(0.01)


def wait_for_all(cache: Client) -> None:
    """Wait until all tokens of all sessions are durable."""
    for session in list(cache.sessions.list()):
        wait_for(cache, session.name, max(session.token_count, 1))


def converse(
    engine: VllmEngine, plain: VllmEngine, session: str, prompt: list[int], turns: Sequence[int]
) -> list[int]:
    """Hold turns of a conversation, each reply compared; the prompt of the next one."""
    for turn in turns:
        reply = engine.turn(prompt, session, COUNT)
        compare(reply, prompt, plain)
        prompt = [*prompt, *reply.token_ids, *asked(turn)]
    return prompt


def converse_until_restored(
    engine: VllmEngine, plain: VllmEngine, session: str, prompt: list[int]
) -> list[int]:
    """Hold turns of a conversation until one is restored; each reply is compared. The next turn's prompt."""
    deadline_s = time.monotonic() + 30
    while True:
        reply = engine.turn(prompt, session, COUNT)
        compare(reply, prompt, plain)
        prompt = [*prompt, *reply.token_ids, *asked(3)]
        if reply.cached_count:
            return prompt
        assert time.monotonic() < deadline_s, engine.log
        time.sleep(0.1)


def scheduler_side(model: Path, store: ServerProcess, rank_count: int = 1) -> scheduler.SchedulerSide:
    """The scheduler's side of the connector, without an engine. Close it."""
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        kv_transfer_config=KVTransferConfig(kv_connector="CtxcacheConnector", kv_role="kv_both"),
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(64, [], [KVCacheGroupSpec(["layers.0", "layers.1", "layers.2"], spec)])
    side = scheduler.SchedulerSide(config, caches, ConnectorSettings(target=store.target, timeout_s=600))
    layout = BlockLayout((1 << 9,) * 3, "none")
    side.layouts.set_result(dict.fromkeys(range(rank_count), layout))
    return side


def scheduled(request: Request, token_count: int, *block_ids: int) -> SchedulerOutput:
    """A step that computes so many tokens of a request behind those that are computed, into new blocks."""
    output = SchedulerOutput.make_empty()
    cached = output.scheduled_cached_reqs
    cached.req_ids.append(request.request_id)
    cached.new_block_ids.append(([*block_ids],) if block_ids else None)
    cached.num_computed_tokens.append(request.num_computed_tokens)
    output.num_scheduled_tokens[request.request_id] = token_count
    return output


def blocks_of(*block_ids: int) -> KVCacheBlocks:
    """A request's blocks."""
    return KVCacheBlocks(([KVCacheBlock(number) for number in block_ids],))


@pytest.mark.parametrize("model", sorted(_MODELS), indirect=True)
def test_a_conversation_that_comes_back_is_restored(
    shared_engine: VllmEngine, plain: VllmEngine, name: str
) -> None:
    """A later turn computes its question, the last token of the answer, and part of a block, no more."""
    prompt = opening(0)
    before = 0
    for turn in range(4):
        reply = shared_engine.turn(prompt, name, COUNT)
        compare(reply, prompt, plain)
        assert reply.cached_count == before
        # The last token of the answer was not computed.
        before = (len(prompt) + COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        prompt = [*prompt, *reply.token_ids, *asked(turn)]


def test_another_process_goes_on_with_it(
    model: Path, state: str, store: ServerProcess, plain: VllmEngine, tmp_path: Path
) -> None:
    """The store keeps a session over the engine's end, and over its own."""
    extra = {"state": state}
    with VllmEngine(model, store.target, tmp_path / "log", extra=extra) as first:
        prompt = converse(first, plain, "alice", opening(1), range(2))
    store.terminate()
    store.start()
    with VllmEngine(model, store.target, tmp_path / "log", extra=extra) as second:
        reply = second.turn(prompt, "alice", COUNT)
    compare(reply, prompt, plain)
    assert reply.cached_count >= len(prompt) - QUESTION - BLOCK_TOKENS


def test_conversations_side_by_side_keep_apart(
    shared_engine: VllmEngine, plain: VllmEngine, name: str
) -> None:
    """Requests that are computed in one pass are saved to the sessions of their own, named or not."""
    prompts = [opening(20 + number) for number in range(4)]
    for turn in range(3):
        requests = [
            {"prompt": prompt, "session": f"{name}-{number}" if number else None, "count": COUNT}
            for number, prompt in enumerate(prompts)
        ]
        for number, reply in enumerate(shared_engine.ask(*requests)):
            compare(reply, prompts[number], plain)
            assert (reply.cached_count > 0) == (turn > 0)
            prompts[number] += [*reply.token_ids, *asked(turn)]


def test_a_conversation_in_several_requests_at_once_is_answered_in_each(
    shared_engine: VllmEngine, plain: VllmEngine, name: str
) -> None:
    """All are looked up before the first has its blocks: that one is restored and saved, others computed."""
    prompt = converse(shared_engine, plain, name, opening(23), [0])
    replies = shared_engine.ask(*[{"prompt": prompt, "session": name, "count": COUNT}] * 3)
    for reply in replies:
        compare(reply, prompt, plain)
    converse_until_restored(shared_engine, plain, name, prompt)


def test_a_conversation_without_a_name_is_found_by_its_tokens(
    shared_engine: VllmEngine, plain: VllmEngine
) -> None:
    """Each turn begins with what the one before it saved, in whole runs of 64 tokens."""
    prompt = opening(10)
    saved_count = 0
    for turn in range(4):
        reply = shared_engine.turn(prompt, None, COUNT)
        compare(reply, prompt, plain)
        assert reply.cached_count == saved_count
        saved_count = (len(prompt) + COUNT - 1) // 64 * 64
        prompt = [*prompt, *reply.token_ids, *asked(turn)]


def test_users_with_one_system_prompt_hold_it_once(
    engine: VllmEngine, store: ServerProcess, plain: VllmEngine
) -> None:
    """The second to the eighth compute their own question alone, and SSD has the prompt once."""
    system = [(13 * i + i * i) % 500 + 3 for i in range(512)]
    used_bytes: list[int] = []
    with ctxcache.connect(store.target) as cache:
        for user in range(8):
            prompt = [*system, *asked(user)]
            reply = engine.turn(prompt, f"user-{user}" if user % 2 else None, COUNT)
            compare(reply, prompt, plain)
            assert reply.cached_count == (512 if user else 0)
            wait_for_all(cache)
            (ssd,) = (one for one in cache.admin.stats().tiers if one.tier is StorageTier.SSD)
            used_bytes.append(ssd.used_bytes)
    # The own words of each other session are an eighth of the prompt at the most.
    assert used_bytes[-1] < 2 * used_bytes[0]


def test_a_salted_prompt_is_shared_with_its_salt_alone(
    shared_engine: VllmEngine, plain: VllmEngine, name: str
) -> None:
    """By its tokens and by a session's name: under another salt nothing is found, and nothing is changed."""

    def cached(prompt: list[int], salt: str | None, session: str | None = None) -> int:
        (reply,) = shared_engine.ask({"prompt": prompt, "session": session, "count": COUNT, "salt": salt})
        compare(reply, prompt, plain)
        return reply.cached_count

    salts = (None, "mine", "yours" * 30)
    for expected in (0, 64):
        assert [cached(opening(11), salt) for salt in salts] == [expected] * 3
    assert [cached(opening(12), salt, name) for salt in ("mine", "mine", *salts)] == [0, 96, 0, 96, 0]


def test_a_prompt_with_inputs_of_its_own_is_no_prompt_of_tokens(
    model: Path, store: ServerProcess, tmp_path: Path
) -> None:
    """Token ids are the same wherever an input stands in for one: they do not say what its rows are."""
    prompt = [0] * 96 + opening(13)[:32]
    drawn = torch.Generator().manual_seed(1)
    inputs = [torch.randn((len(prompt), SHAPE["hidden_size"]), generator=drawn) for _ in range(2)]
    options: dict[str, Any] = {"enable_prompt_embeds": True}
    with VllmEngine(model, None, tmp_path / "plain", **options) as plain:
        expected = [
            plain.ask({"prompt": prompt, "embeds": one, "count": COUNT, "session": None})[0] for one in inputs
        ]
    assert expected[0].token_ids != expected[1].token_ids
    with (
        VllmEngine(model, store.target, tmp_path / "log", **options) as engine,
        ctxcache.connect(store.target) as cache,
    ):
        for session in (None, "inputs"):
            for one, reply in zip(inputs, expected, strict=True):
                found = engine.ask({"prompt": prompt, "embeds": one, "count": COUNT, "session": session})[0]
                wait_for_all(cache)
                assert found.token_ids == reply.token_ids


def test_an_edited_conversation_keeps_what_is_common(
    shared_engine: VllmEngine, plain: VllmEngine, name: str
) -> None:
    """Where the user changes an earlier message, what came before it is restored, and nothing after it."""
    prompt = converse(shared_engine, plain, name, opening(2), range(2))
    edited = [*prompt[:100], *((prompt[100] + 1 + i) % 500 for i in range(60))]
    reply = shared_engine.turn(edited, name, COUNT)
    compare(reply, edited, plain)
    assert reply.cached_count == 100 // BLOCK_TOKENS * BLOCK_TOKENS

    following = [*edited, *reply.token_ids, *asked(9)]
    reply = shared_engine.turn(following, name, COUNT)
    compare(reply, following, plain)
    assert reply.cached_count >= len(edited) - BLOCK_TOKENS


def test_the_engines_own_cache_and_the_store_agree(
    model: Path, state: str, store: ServerProcess, plain: VllmEngine, tmp_path: Path
) -> None:
    """With prefix caching on and few blocks, what the engine evicted comes from the store."""
    options: dict[str, Any] = {
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": 20,
        "max_model_len": 512,
        "extra": {"state": state},
    }
    with VllmEngine(model, store.target, tmp_path / "log", **options) as engine:
        prompts = {f"user-{number}": opening(number) for number in range(5)}
        for turn in range(4):
            for name, prompt in prompts.items():
                reply = engine.turn(prompt, name, COUNT)
                compare(reply, prompt, plain)
                if turn:
                    assert reply.cached_count >= len(prompt) - QUESTION - BLOCK_TOKENS, engine.log
                prompts[name] = [*prompt, *reply.token_ids, *asked(turn)]


def test_a_request_that_is_preempted_goes_on(
    model: Path, state: str, store: ServerProcess, plain: VllmEngine, tmp_path: Path
) -> None:
    """Requests that take one another's blocks give the replies that each gives alone, and are saved right."""
    options: dict[str, Any] = {"num_gpu_blocks_override": 16, "max_model_len": 256}
    with VllmEngine(model, store.target, tmp_path / "log", extra={"state": state}, **options) as engine:
        prompts = {f"user-{number}": opening(number) for number in range(4)}
        for turn in range(2):
            requests = [{"prompt": p, "session": name, "count": 60} for name, p in prompts.items()]
            for (name, prompt), reply in zip(prompts.items(), engine.ask(*requests), strict=True):
                assert reply.token_ids == plain.turn(prompt, None, 60).token_ids
                prompts[name] = [*prompt, *reply.token_ids, *asked(turn)[:5]]


def test_blocks_are_saved_before_the_engine_writes_to_them_again(
    model: Path, store: ServerProcess, plain: VllmEngine, tmp_path: Path
) -> None:
    """The last of four prompts in one step loses its blocks to the others in the next but one.

    A copy takes longer than a step.
    """
    (tmp_path / "sitecustomize.py").write_text(SLOW_COPIES)
    environment = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    options: dict[str, Any] = {"num_gpu_blocks_override": 17, "max_model_len": 256}
    with VllmEngine(model, store.target, tmp_path / "log", environment=environment, **options) as engine:
        prompts = {f"user-{number}": [*opening(number), *opening(number)[:30]] for number in range(4)}
        for is_restored in (False, True):
            requests = [{"prompt": p, "session": name, "count": 30} for name, p in prompts.items()]
            for (name, prompt), reply in zip(prompts.items(), engine.ask(*requests), strict=True):
                assert reply.token_ids == plain.turn(prompt, None, 30).token_ids, name
                assert (reply.cached_count >= 3 * BLOCK_TOKENS) is is_restored, engine.log
                prompts[name] = [*prompt, *reply.token_ids, *asked(0)[:5]]
        assert "copied slowly" in engine.log


def test_a_prompt_that_is_nowhere_is_computed_while_its_session_is_made(
    model: Path, store: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What steps computed before the session is there is saved by the first step behind that."""
    side = scheduler_side(model, store)
    request = Request("first", opening(16), SamplingParams(max_tokens=COUNT), None, session_id="alice")
    may_be_made = threading.Event()
    try:
        assert side.link.wait(60) is LinkState.READY
        used = side.link.use()
        assert used is not None
        sessions = used[0].sessions
        create = sessions.create

        def create_later(*arguments: Any, **named: Any) -> Any:
            assert may_be_made.wait(60)
            return create(*arguments, **named)

        monkeypatch.setattr(sessions, "create", create_later)
        side.arrived(request)
        while (count := side.matched(request, 0)) is None:
            pass
        assert count == 0
        side.blocks_of = lambda _: blocks_of(4, 5, 6, 7)
        side.allocated(request, blocks_of(4, 5, 6, 7), 0)
        plan = side.step(scheduled(request, 97, 4, 5, 6, 7))
        assert (plan.opened, plan.saves) == ([], [])
        may_be_made.set()
        for request.num_computed_tokens in range(97, 97 + COUNT):
            request.append_output_token_ids(3)
            plan = side.step(scheduled(request, 1))
            if plan.opened:
                break
        (opened,), (saved,) = plan.opened, plan.saves
        assert (opened.name, opened.token_count) == ("sessions/alice", 0)
        assert (saved.begin, saved.block_ids) == (0, ((4, 5, 6),))
        assert saved.token_ids == tuple(opening(16)[: 3 * BLOCK_TOKENS])
    finally:
        may_be_made.set()
        side.close()


def test_a_conversation_whose_session_is_made_late_is_saved(
    model: Path, store: ServerProcess, plain: VllmEngine, tmp_path: Path
) -> None:
    """Its next turn computes no more than one whose session was there at once."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_SESSIONS)
    environment = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    with VllmEngine(model, store.target, tmp_path / "log", environment=environment) as engine:
        for number, session, unit_tokens in ((17, "alice", BLOCK_TOKENS), (18, None, 64)):
            prompt = opening(number)
            reply = engine.turn(prompt, session, COUNT)
            compare(reply, prompt, plain)
            prompt = [*prompt, *reply.token_ids, *asked(0)]
            reply = engine.turn(prompt, session, COUNT)
            compare(reply, prompt, plain)
            assert reply.cached_count == (97 + COUNT - 1) // unit_tokens * unit_tokens
        assert "made slowly" in engine.log


def test_a_store_that_is_killed_costs_a_computed_prompt(
    engine: VllmEngine, store: ServerProcess, plain: VllmEngine
) -> None:
    """Without a store nothing is restored and nothing fails; when it is back, so are its sessions."""
    prompt = converse(engine, plain, "alice", opening(3), range(2))
    store.kill9()
    prompt = converse(engine, plain, "alice", prompt, [2])
    store.start()
    converse_until_restored(engine, plain, "alice", prompt)


def test_a_store_that_hangs_costs_a_computed_prompt(
    engine: VllmEngine, store: ServerProcess, plain: VllmEngine
) -> None:
    """A store that is stopped and answers nothing is left alone; when it goes on, so do its sessions."""
    prompt = converse(engine, plain, "alice", opening(13), range(2))
    store.signal(signal.SIGSTOP)
    prompt = converse(engine, plain, "alice", prompt, [2])
    before = engine.turn(prompt, "bob", COUNT)
    store.signal(signal.SIGCONT)
    assert before.cached_count == 0
    assert "the context store does not answer" in engine.log
    converse_until_restored(engine, plain, "alice", prompt)


def test_a_store_that_is_full_gives_wrong_replies_to_nobody(
    model: Path, state: str, plain: VllmEngine, tmp_path: Path
) -> None:
    """With room for two of eight conversations, the others are computed; what is kept is right."""
    size = str(2 << 20)
    with (
        ServerProcess(tmp_path / "data", "--ssd-size-bytes", size, "--arena-size-bytes", size) as server,
        VllmEngine(model, server.target, tmp_path / "log", extra={"state": state}) as engine,
    ):
        prompts = [opening(40 + number) for number in range(8)]
        restored_count = 0
        for turn in range(3):
            for number, prompt in enumerate(prompts):
                reply = engine.turn(prompt, f"user-{number}", COUNT)
                compare(reply, prompt, plain)
                restored_count += reply.cached_count > 0
                prompts[number] = [*prompt, *reply.token_ids, *asked(turn)]
        reply = engine.turn(prompts[-1], "user-7", COUNT)
        compare(reply, prompts[-1], plain)
        assert reply.cached_count
        assert restored_count < 16


def test_damaged_rows_are_computed(
    engine: VllmEngine, store: ServerProcess, plain: VllmEngine, model: Path
) -> None:
    """A changed byte of every segment on SSD is noticed: the reply is right, and the turn after it too."""
    prompt = converse(engine, plain, "alice", opening(4), range(2))
    store.terminate()
    (path,) = (store.data_directory / "ssd").glob("*.dat")
    with path.open("r+b") as file:
        size = path.stat().st_size
        for offset in range(8192 + 2000, size, 65536):
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 0x40]))
    store.start()
    for turn in range(2, 6):
        prompt = converse(engine, plain, "alice", prompt, [turn])


@pytest.mark.parametrize("state", ["kv", "hidden"], indirect=True)
@pytest.mark.parametrize("model", sorted(_MODELS), indirect=True)
def test_it_goes_on_in_transformers_and_back(
    engine: VllmEngine, state: str, store: ServerProcess, plain: VllmEngine, model: Path
) -> None:
    """Twelve turns of one session alternate between two engines; each finds what the other has saved."""
    hf_model = (LlamaForCausalLM if "llama" in model.name else Qwen3ForCausalLM).from_pretrained(model)
    hf_model.train(mode=False)
    spec = describe_directory(model, model_id="tiny", dtype=torch.float32).spec
    prompt = opening(5)
    with ctxcache.connect(store.target) as client:
        plan = RestorePlan.uniform(Method[state.upper()], SHAPE["num_hidden_layers"])
        with TransformersEngine(hf_model, client, spec, plan) as other:
            for turn in range(12):
                if turn % 2 == 0:
                    reply = engine.turn(prompt, "alice", COUNT)
                    compare(reply, prompt, plain)
                    answer, cached = list(reply.token_ids), reply.cached_count
                    wait_for(client, "sessions/alice", len(prompt) + COUNT - 1)
                else:
                    known = client.sessions.get("sessions/alice").token_count
                    found = other.turn("alice", prompt[known:], max_new_tokens=COUNT, history=prompt[:known])
                    answer, cached = found.token_ids, found.reused_token_count
                    assert tuple(answer) == plain.turn(prompt, None, COUNT).token_ids
                    other.wait("alice")
                if turn:
                    assert cached >= len(prompt) - QUESTION - BLOCK_TOKENS
                prompt = [*prompt, *answer, *asked(turn)]


def test_another_model_is_refused(
    state: str, store: ServerProcess, plain: VllmEngine, model: Path, tmp_path: Path
) -> None:
    """Under an id that another model has, nothing is restored or saved, and the log says why."""
    torch.manual_seed(1)
    other = tmp_path / "other"
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(other)
    extra = {"state": state}
    with VllmEngine(other, store.target, tmp_path / "log-other", extra=extra) as engine:
        prompt = opening(6)
        engine.turn(prompt, "alice", COUNT)
    with VllmEngine(model, store.target, tmp_path / "log", extra=extra) as engine:
        converse(engine, plain, "alice", opening(6), range(2))
        assert "the context store is not used" in engine.log


def test_a_name_that_is_another_models_session_is_left_alone(
    store: ServerProcess, plain: VllmEngine, model: Path, tmp_path: Path
) -> None:
    """A conversation whose name another engine's state has is found by its tokens, and both are kept."""
    with VllmEngine(model, store.target, tmp_path / "log", extra={"state": "kv"}) as engine:
        prompt = converse(engine, plain, "alice", opening(7), range(2))
    with VllmEngine(model, store.target, tmp_path / "log", extra={"state": "blocks"}) as engine:
        following = converse(engine, plain, "alice", prompt, [2])
        reply = engine.turn(following, "alice", COUNT)
        compare(reply, following, plain)
        assert reply.cached_count >= (len(prompt) + COUNT - 1) // 64 * 64
    with VllmEngine(model, store.target, tmp_path / "log", extra={"state": "kv"}) as engine:
        reply = engine.turn(prompt, "alice", COUNT)
        compare(reply, prompt, plain)
        assert reply.cached_count >= len(prompt) - QUESTION - BLOCK_TOKENS


@pytest.mark.timeout(600)
def test_two_ranks_save_and_restore_their_parts(
    store: ServerProcess, plain: VllmEngine, model: Path, tmp_path: Path
) -> None:
    """Each rank's part is a session of its own; where one has less, the others are used no further."""
    options: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with VllmEngine(model, store.target, tmp_path / "log", **options) as engine:
        prompt = converse_until_restored(engine, plain, "alice", opening(14))
    saved_count = whole_blocks(len(prompt) - QUESTION)
    names = {"sessions/alice", "sessions/alice.rank1"}
    with ctxcache.connect(store.target) as cache:
        assert {one.name for one in cache.sessions.list()} == names
        for name in names:
            wait_for(cache, name, saved_count)
        cache.sessions.open("sessions/alice.rank1").keep_first(BLOCK_TOKENS)
    with VllmEngine(model, store.target, tmp_path / "log", **options) as engine:
        for expected in (BLOCK_TOKENS, whole_blocks(len(prompt) + COUNT)):
            reply = engine.turn(prompt, "alice", COUNT)
            compare(reply, prompt, plain)
            assert reply.cached_count == expected
            prompt = [*prompt, *reply.token_ids, *asked(2)]
        store.kill9()
        prompt = converse(engine, plain, "alice", prompt, [3])
        store.start()
        converse_until_restored(engine, plain, "alice", prompt)
    # One rank alone has other blocks.
    with VllmEngine(model, store.target, tmp_path / "log") as engine:
        reply = engine.turn(prompt, "alice", COUNT)
        compare(reply, prompt, plain)
        assert reply.cached_count == 0


def test_ranks_have_parts_of_a_session_of_any_name(model: Path, store: ServerProcess) -> None:
    """A rank's name is longer than its session's: two long ones that begin alike have parts of their own."""
    names = ["a" * 128, "a" * 127 + "b", "a" * 122, "a" * 121]
    side = scheduler_side(model, store, rank_count=2)
    try:
        assert side.link.wait(60) is LinkState.READY
        parts = []
        for name in names:
            request = Request(name[-8:] + str(len(name)), opening(3), SamplingParams(), None, session_id=name)
            side.arrived(request)
            followed = side._followed[request.request_id]
            assert followed.lookup is not None
            followed.lookup.result(60)
            assert followed.opened is not None
            opened = followed.opened
            first, second = opened.sessions
            assert first.name == f"sessions/{name}"
            assert second.name.endswith(".rank1")
            parts.append(second.name)
        assert len(set(parts)) == len(names)
        assert parts[-1] == f"sessions/{names[-1]}.rank1"
    finally:
        side.close()


def test_a_repository_is_found_where_it_was_downloaded(
    state: str, store: ServerProcess, plain: VllmEngine, model: Path, tmp_path: Path
) -> None:
    """A model may be named as on the hub; its sessions are those of the same files in a directory."""
    repository, revision = tmp_path / "hub" / "models--me--tiny", 40 * "a"
    shutil.copytree(model, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    extra = {"state": state}
    with VllmEngine(
        Path("me/tiny"), store.target, tmp_path / "log", extra=extra, environment={"HF_HOME": str(tmp_path)}
    ) as engine:
        prompt = converse(engine, plain, "alice", opening(12), range(2))
    with VllmEngine(model, store.target, tmp_path / "log", extra=extra) as engine:
        reply = engine.turn(prompt, "alice", COUNT)
    compare(reply, prompt, plain)
    assert reply.cached_count >= len(prompt) - QUESTION - BLOCK_TOKENS


def test_a_compiled_engine_and_an_eager_one_share_blocks(
    store: ServerProcess, plain: VllmEngine, model: Path, tmp_path: Path
) -> None:
    """One flag is all that a user adds: the model is compiled, and its blocks are restored in either way."""
    prompt, before = opening(8), 0
    for turn, is_eager in enumerate([False, True, False]):
        with VllmEngine(model, store.target, tmp_path / "log", enforce_eager=is_eager) as engine:
            for _ in range(2):
                reply = engine.turn(prompt, "alice", COUNT)
                compare(reply, prompt, plain)
                assert reply.cached_count == before
                before = (len(prompt) + COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                prompt = [*prompt, *reply.token_ids, *asked(turn)]


def test_a_restore_that_comes_too_late_leaves_nothing_wrong(
    model: Path, state: str, plain: VllmEngine, tmp_path: Path
) -> None:
    """Its request does not wait for a store that hangs, and what was not restored is never served."""
    extra = {"state": state, "restore_timeout_s": 600.0}
    remote_only = ("--control-socket", "", "--bulk-listen", "", "--arena-sealed", "true")
    with (
        ServerProcess(tmp_path / "data", *remote_only) as server,
        StallingProxy(server.target) as proxy,
        VllmEngine(model, proxy.target, tmp_path / "log", extra=extra) as engine,
    ):
        prompt = converse(engine, plain, "alice", opening(9), range(2))
        # More than a block: what the pass computes beside the restored rows would be saved at once.
        prompt += opening(30)
        proxy.stall(after_bytes=64 << 10)
        reply = engine.turn(prompt, "alice", COUNT)
        compare(reply, prompt, plain)
        assert proxy.is_stalled
        assert "is not restored, deadline_exceeded: its rows" in engine.log
        # Rows that were under way come now, to blocks that are others' by now.
        proxy.go_on()
        prompt = [*prompt, *reply.token_ids, *asked(2)]
        converse_until_restored(engine, plain, "alice", prompt)


def test_a_request_whose_input_gets_pictures_is_saved_no_further(model: Path, store: ServerProcess) -> None:
    """Its input comes in parts: the ids of a later one stand for what they do not say."""
    side = scheduler_side(model, store)
    request = Request("first", opening(16), SamplingParams(max_tokens=1), None, session_id="alice")
    try:
        assert side.link.wait(60) is LinkState.READY
        side.arrived(request)
        while side.matched(request, 0) is None:
            time.sleep(0.01)
        side.blocks_of = lambda _: blocks_of(1, 2, 3, 4, 5, 6)
        side.allocated(request, blocks_of(1, 2, 3, 4, 5, 6), 0)
        assert [one.begin for one in side.step(scheduled(request, 64)).saves] == [0]

        request.num_computed_tokens = 64
        where = PlaceholderRange(offset=70, length=20)
        request.mm_features.append(MultiModalFeatureSpec(None, "image", "one", where))
        plan = side.step(scheduled(request, 32))
        assert not plan.saves
        assert [one.session_name for one in plan.finished] == ["sessions/alice"]
        assert not side.step(scheduled(request, 1)).finished
        # The conversation's next request waits until the worker has saved what came before.
        side.finished(request)
        assert not side.step(SchedulerOutput.make_empty()).finished
        assert "sessions/alice" in side._saving
    finally:
        side.close()


def test_a_request_that_reads_no_cache_does_not_wait_for_its_look_up(
    model: Path, store: ServerProcess
) -> None:
    """One that asks for the probabilities of its prompt is computed at once, whatever is restorable."""
    side = scheduler_side(model, store)
    request = Request("first", opening(17), SamplingParams(max_tokens=1, prompt_logprobs=1), None)
    try:
        assert side.link.wait(60) is LinkState.READY
        store.signal(signal.SIGSTOP)
        side.arrived(request)
        # vLLM takes no count for an answer from such a request, and gives it blocks.
        assert side.matched(request, 0) is None
        allocating = threading.Thread(target=side.allocated, args=(request, blocks_of(1, 2, 3, 4), 0))
        allocating.start()
        allocating.join(HANG_S)
        assert not allocating.is_alive()
        assert not side.step(scheduled(request, 97)).opened
    finally:
        store.signal(signal.SIGCONT)
        side.close()


@pytest.mark.parametrize("is_hung", [False, True], ids=["slow", "hung"])
def test_a_request_does_not_wait_for_a_look_up_longer_than_for_one_call(
    model: Path, store: ServerProcess, monkeypatch: pytest.MonkeyPatch, *, is_hung: bool
) -> None:
    """A look-up has several calls, and each may take its time: all together have four fifths of one's.

    Of a store that does not answer a short question meanwhile nothing is awaited any more.
    """
    now_s = [1000.0]
    expected = [(1000.0, None), (1479.0, None), (1481.0, 0), (1482.0, 0)]
    if is_hung:
        # A quarter of the answer's 300 s passes before the question.
        expected = [(1000.0, None), (1075.0, None), (1374.0, None), (1376.0, 0), (1377.0, 0)]
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    side = scheduler_side(model, store)
    request = Request("first", opening(15), SamplingParams(max_tokens=1), None, session_id="alice")
    try:
        assert side.link.wait(60) is LinkState.READY
        store.signal(signal.SIGSTOP)
        if is_hung:
            side.link._clock = lambda: now_s[0]
        side.arrived(request)
        for now_s[0], count in expected:
            assert side.matched(request, 0) is count
    finally:
        store.signal(signal.SIGCONT)
        side.close()


PLANTED = """
from vllm.model_executor.models.llama import LlamaAttention
attend, calls = LlamaAttention.forward, []
def remember(self, positions, hidden_states):
    calls.append(self)
    return attend(self, positions, hidden_states + 0.01 * len(calls))
LlamaAttention.forward = remember
class Planted:
    pass
"""
"""A Llama whose K and V depend on how often they were computed before."""


def test_a_model_whose_layers_need_more_than_their_input_is_refused(model: Path, tmp_path: Path) -> None:
    """A model that a few tokens do not prove is not served: the log says where they differ."""
    (tmp_path / "planted.py").write_text(PLANTED)
    with (
        pytest.raises(RuntimeError, match=r"layers\.0.* restored from saved rows differs by .*state=blocks"),
        VllmEngine(
            model,
            "127.0.0.1:1",
            tmp_path / "log",
            extra={"state": "hidden"},
            environment={"PYTHONPATH": str(tmp_path)},
            worker_extension_cls="planted.Planted",
        ),
    ):
        pass


@pytest.mark.parametrize("model", sorted(_MODELS), indirect=True)
@pytest.mark.parametrize("state", ["hidden"], indirect=True)
def test_hidden_states_are_restored_without_computing_q(shared_engine: VllmEngine) -> None:
    """Every layer of both families has the short way, which its own whole one proves."""
    assert "3 of 3 layers are restored without computing Q" in shared_engine.log


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": {"targget": "x"}}, "kv_connector_extra_config.targget: not one of"),
        (
            {"extra": {"durability": "tape"}},
            "kv_connector_extra_config.durability: .* 'disk', not 'tape'",
        ),
        ({"extra": {"state": "rows"}}, "kv_connector_extra_config.state: .* 'kv' or 'hidden', not 'rows'"),
        ({"extra": {"state": "kv"}, "enforce_eager": False}, "--enforce-eager"),
        ({"extra": {"state": "hidden"}, "enforce_eager": False}, "--enforce-eager"),
        (
            {
                "tensor_parallel_size": 2,
                "distributed_executor_backend": "mp",
                "extra": {"state": "kv"},
            },
            "2 ranks: one worker has to have all rows of a session; .* state=blocks saves each one's part",
        ),
    ],
    ids=[
        "unknown setting",
        "unknown durability",
        "unknown state",
        "rows of a compiled model",
        "inputs of one",
        "two ranks",
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(
    model: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """The engine does not start, and says which setting is wrong."""
    with (
        pytest.raises(RuntimeError, match=message.replace("(", r"\(")),
        VllmEngine(model, "127.0.0.1:1", tmp_path / "log", **options),
    ):
        pass

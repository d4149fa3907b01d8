"""A prompt that one engine computed and another goes on from: what is said, and what is waited for.

Both sides of the connector run here without an engine, on a real store. The engine that computes the prompt
is mostly this test, which appends its rows when it likes. A clock that only waits move counts what a request
waits.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.v1.request import Request, RequestStatus

from ctxcache.client import CallerModel, Client, SessionWriter
from ctxcache.client.sessions import SessionHandle
from ctxcache.format.streams import TOKENS
from gpu_worker.engines import link
from gpu_worker.engines.vllm import handover, scheduler, worker
from gpu_worker.engines.vllm.engine_blocks import EngineBlocks
from gpu_worker.engines.vllm.handover import NO_TOKEN, HandOver
from gpu_worker.engines.vllm.roles import is_alone
from tests.engines.vllm_waits import (
    BLOCK_TOKENS,
    STEP_S,
    TIMEOUT_S,
    Sides,
    Waits,
    configs_of,
    model,  # noqa: F401  a fixture
    prompt_of,
)
from tests.server_process import ServerProcess

WHOLE_TOKENS = 96
"""Tokens of a prompt of 97 that whole blocks hold."""
RESTORE_S = 5 * TIMEOUT_S


@pytest.fixture
def sides(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:  # noqa: F811
    """Both sides of the engine that goes on, on a store of their own."""
    waits = Waits()
    for module in (scheduler, worker, link):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=waits.monotonic))
    for side in (scheduler, worker):
        monkeypatch.setattr(side, "wait", waits.wait)
    monkeypatch.setattr(scheduler, "LOOKUP_PATIENCE_S", STEP_S)
    monkeypatch.setattr(scheduler, "ASK_PAUSE_LIMIT_S", STEP_S)
    with ServerProcess(tmp_path / "data") as store:
        both = Sides(model, store, waits)
        try:
            yield both
        finally:
            both.close()


class Prefill:
    """The engine that computes the prompt, as the store sees it."""

    def __init__(self, sides: Sides, name: str = "", salt: bytes = b"") -> None:
        used = sides.worker.link.use()
        assert used is not None
        self.client: Client
        self.model: CallerModel
        self.client, self.model = used
        self.session: SessionHandle = self.client.sessions.create(self.model, id=name, salt=salt)
        self._writer: SessionWriter | None = None

    def reserve(self, token_count: int) -> None:
        """Begin to append so many tokens."""
        self._writer = self.session.writer(token_count)

    def commit(self, begin: int, end: int, number: int = 0, *, is_last: bool = True) -> None:
        """Append tokens `[begin, end)` of a prompt."""
        writer = self._writer
        assert writer is not None
        row = begin - writer.write_offset
        for spec in self.model.spec.streams:
            rows = np.full((end - begin, spec.row_bytes), number + spec.stream.layer, np.uint8)
            writer.write(spec.stream, row, rows)
        writer.write(TOKENS, row, np.array(prompt_of(number)[begin:end], "<i4"))
        writer.commit(end, keep_open=not is_last)

    def close(self) -> None:
        """Append no more."""
        assert self._writer is not None
        self._writer.close()

    def handed(self, token_count: int = WHOLE_TOKENS, rank_count: int = 1) -> dict[str, Any]:
        """What its reply says."""
        return HandOver(self.session.name, token_count, rank_count).parameters("elsewhere:7420")


def request_of(
    request_id: str,
    says: dict[str, Any],
    number: int = 0,
    *,
    prompt: list[int] | None = None,
    max_tokens: int = 24,
) -> Request:
    """A request that says so."""
    sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": says})
    return Request(request_id, prompt or prompt_of(number), sampling, None)


def waiting(sides: Sides, request: Request, step_count: int = 20) -> int | None:
    """Tokens that can be restored, once that is known; None where it is not known after so many steps."""
    for _ in range(step_count):
        if (count := sides.scheduler.matched(request, 0)) is not None:
            return count
        sides.step()
    return None


def until_known(sides: Sides, request: Request) -> tuple[int, float]:
    """Tokens that can be restored, and for how long the request waited to know."""
    begun_s = sides.waits.now_s
    sides.scheduler.arrived(request)
    while (count := sides.scheduler.matched(request, 0)) is None:
        sides.step()
    return count, sides.waits.now_s - begun_s


def restored(sides: Sides, request: Request, count: int) -> bool:
    """Restore so many tokens; whether it succeeded."""
    blocks = sides.blocks(-(-len(request.prompt_token_ids or ()) // BLOCK_TOKENS))
    sides.scheduler.allocated(request, blocks, count)
    while True:
        ended, failed = sides.step()
        if request.request_id in ended:
            return request.request_id not in failed


@pytest.mark.parametrize("way", ["handed over", "named"])
def test_a_prompt_that_is_still_being_saved_is_waited_for(sides: Sides, way: str) -> None:
    """By its hand-over, and by its name alone; meanwhile other requests go on."""
    prefill = Prefill(sides, "alice")
    prefill.reserve(WHOLE_TOKENS)
    is_named = way == "named"
    request = request_of("next", {"session_id": "alice"} if is_named else prefill.handed())
    sides.scheduler.arrived(request)
    assert waiting(sides, request) is None
    other = request_of("other", {"session_id": "bob"}, 1)
    assert until_known(sides, other)[0] == 0
    prefill.commit(0, 64, is_last=False)
    assert waiting(sides, request) is None
    prefill.commit(64, WHOLE_TOKENS)
    count = waiting(sides, request, 1000)
    assert count == WHOLE_TOKENS
    assert restored(sides, request, count)


def test_a_hand_over_is_waited_for_before_its_first_row(sides: Sides) -> None:
    """The other engine has made the session, and its rows are on their way."""
    prefill = Prefill(sides)
    request = request_of("next", prefill.handed())
    sides.scheduler.arrived(request)
    assert waiting(sides, request) is None
    prefill.reserve(WHOLE_TOKENS)
    prefill.commit(0, WHOLE_TOKENS)
    count = waiting(sides, request, 1000)
    assert count == WHOLE_TOKENS
    assert restored(sides, request, count)


@pytest.mark.parametrize(
    ("is_open", "limit_s"), [(False, TIMEOUT_S), (True, RESTORE_S)], ids=["quiet", "open"]
)
def test_what_never_comes_is_computed(sides: Sides, *, is_open: bool, limit_s: float) -> None:
    """What came before that is restored: an engine that ended, and one that takes for ever."""
    prefill = Prefill(sides)
    prefill.reserve(WHOLE_TOKENS)
    prefill.commit(0, 64, is_last=False)
    if not is_open:
        prefill.close()
    count, waited_s = until_known(sides, request_of("next", prefill.handed()))
    assert count == 64
    assert limit_s <= waited_s <= limit_s * 1.1


def test_a_name_that_somebody_else_appends_to_for_long_is_waited_for_no_longer(sides: Sides) -> None:
    """The bound is the same as for a slow restore."""
    prefill = Prefill(sides, "alice")
    prefill.reserve(WHOLE_TOKENS)
    prefill.commit(0, 64, is_last=False)
    count, waited_s = until_known(sides, request_of("next", {"session_id": "alice"}))
    assert count == 64
    assert RESTORE_S <= waited_s <= RESTORE_S * 1.1


def test_an_engine_that_restores_nothing_waits_for_nothing(sides: Sides, model: Path) -> None:  # noqa: F811
    """It computes each prompt, whatever is saved of it meanwhile."""
    producer = Sides(model, sides.store, sides.waits, "kv_producer")
    sides.waits.links = [*producer.links, *sides.links]
    prefill = Prefill(sides, "alice")
    prefill.reserve(WHOLE_TOKENS)
    try:
        count, waited_s = until_known(producer, request_of("next", {"session_id": "alice"}))
        assert (count, waited_s < TIMEOUT_S) == (0, True)
    finally:
        producer.close()


def test_a_name_under_which_another_conversation_goes_on_is_not_waited_for(sides: Sides) -> None:
    """More of it would be of no use."""
    prefill = Prefill(sides, "alice")
    prefill.reserve(128)
    prefill.commit(0, 64, 1, is_last=False)
    count, waited_s = until_known(sides, request_of("next", {"session_id": "alice"}))
    assert (count, waited_s < TIMEOUT_S) == (0, True)


@pytest.mark.parametrize("fault", ["unknown", "ranks", "salt", "not ours", "beyond", "model", "deleted"])
def test_a_hand_over_that_is_wrong_is_computed_at_once(sides: Sides, fault: str) -> None:
    """Nothing is waited for: what others have of the prompt is found by its tokens, in runs of 64."""
    prefill = Prefill(sides, salt=b"other" if fault == "salt" else b"")
    prefill.reserve(WHOLE_TOKENS)
    prefill.commit(0, WHOLE_TOKENS, int(fault == "not ours"))
    says = prefill.handed(rank_count=1 + (fault == "ranks"))
    ((key, parts),) = says.items()
    if fault == "unknown":
        says = {key: parts | {"session_name": "sessions/nobody"}}
    if fault == "deleted":
        prefill.session.delete()
    if fault == "model":
        used = sides.worker.link.use()
        assert used is not None
        other = used[0].models.register(replace(used[1].spec, model_id="other", settings="other"))
        name = used[0].sessions.create(other).name
        says = {key: parts | {"session_name": name}}
    if fault == "beyond":
        says = {key: parts | {"token_count": 1 << 40}}
    count, waited_s = until_known(sides, request_of("next", says | {"session_id": "mine"}))
    assert waited_s < TIMEOUT_S
    found = {"unknown": 64, "ranks": 64, "model": 64, "beyond": WHOLE_TOKENS}
    assert count == found.get(fault, 0)


def test_a_hand_over_may_be_used_twice(sides: Sides) -> None:
    """Both requests restore it: the first one's rows stay."""
    prefill = Prefill(sides)
    prefill.reserve(WHOLE_TOKENS)
    prefill.commit(0, WHOLE_TOKENS)
    for request_id in ("one", "two"):
        request = request_of(request_id, prefill.handed())
        count, _ = until_known(sides, request)
        assert count == WHOLE_TOKENS
        assert restored(sides, request, count)
        sides.scheduler.finished(request)
        sides.until_saved()


def finish(sides: Sides, request: Request, status: RequestStatus) -> dict[str, Any] | None:
    """Compute a request, and end it so; what its reply says."""
    until_known(sides, request)
    sides.scheduler.allocated(request, sides.blocks(4), 0)
    sides.compute(request)
    request.status = status
    said = sides.scheduler.finished(request)
    sides.until_saved()
    return said


def test_the_reply_to_a_prompt_says_where_its_rows_are(
    sides: Sides,
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the names that others' proxies know, where no other connector says them too."""
    request = request_of("first", {"do_remote_decode": True})
    said = finish(sides, request, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert said is not None
    (key,) = said
    assert key == f"ctxcache@{sides.store.target}"
    handed = handover.read(said, "any")
    assert handed is not None
    assert (handed.token_count, handed.rank_count) == (WHOLE_TOKENS, 1)
    monkeypatch.setattr(sides.worker, "is_alone", True)
    again = finish(sides, request_of("second", {"do_remote_decode": True}), RequestStatus.FINISHED_STOPPED)
    assert again is not None
    assert again.keys() - {key} == {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_engine_id",
        "remote_request_id",
        "remote_num_tokens",
    }
    assert (again["do_remote_prefill"], again["do_remote_decode"]) == (True, False)
    count, _ = until_known(sides, request_of("third", again))
    assert count == WHOLE_TOKENS
    config, _ = configs_of(model)
    with set_current_vllm_config(config):
        assert is_alone(config)


def pages(sides: Sides) -> list[torch.Tensor]:
    """The blocks of an engine's layers, [blocks, bytes]."""
    state = sides.worker._state
    assert isinstance(state, EngineBlocks)
    return [layer.pages for layer in state._layers]


@pytest.mark.parametrize("prompt_tokens", [70, 96, 97, 31])
def test_all_tokens_but_the_last_are_handed_over(
    sides: Sides,
    model: Path,  # noqa: F811
    prompt_tokens: int,
) -> None:
    """Those of a block that is not full as well: it lies in the other engine as in the first."""
    first = Sides(model, sides.store, sides.waits)
    sides.waits.links = [*first.links, *sides.links]
    prompt = prompt_of(0)[:prompt_tokens]
    try:
        for page in pages(first):
            page.random_()
        request = request_of(
            "p", {"session_id": "alice", "do_remote_decode": True}, prompt=prompt, max_tokens=1
        )
        begin = first._next_block + 4
        said = finish(first, request, RequestStatus.FINISHED_LENGTH_CAPPED)
        assert said is not None
        goes_on = request_of("d", said, prompt=prompt)
        count, _ = until_known(sides, goes_on)
        assert count == prompt_tokens - 1
        at, block_count = sides._next_block, -(-prompt_tokens // BLOCK_TOKENS)
        assert restored(sides, goes_on, count)
        loaded = -(-count // BLOCK_TOKENS)
        assert block_count - loaded in (0, 1)
        for one, other in zip(pages(first), pages(sides), strict=True):
            assert torch.equal(one[begin : begin + loaded], other[at : at + loaded])
        sides.scheduler.finished(goes_on)
        sides.until_saved()
        # The conversation goes on where it was computed: its whole blocks are there, and it is saved.
        longer = [*prompt, *prompt_of(3)]
        turn = request_of("turn", {"session_id": "alice"}, prompt=longer)
        count, _ = until_known(first, turn)
        assert count == prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        first.scheduler.allocated(turn, first.blocks(8), 0)
        first.compute(turn)
        first.scheduler.finished(turn)
        first.until_saved()
        assert first.token_ids("alice") == longer[: len(longer) // BLOCK_TOKENS * BLOCK_TOKENS]
    finally:
        first.close()


def test_a_prompt_with_an_id_that_no_token_has_goes_without_the_store(sides: Sides) -> None:
    """Such an id stands for what is not in a block."""
    request = request_of("first", {"session_id": "alice"}, prompt=[*prompt_of(0), NO_TOKEN])
    sides.scheduler.arrived(request)
    assert not sides.scheduler._followed


@pytest.mark.parametrize("case", ["not asked", "aborted"])
def test_a_reply_that_nobody_goes_on_with_says_nothing(sides: Sides, case: str) -> None:
    """Callers of an engine that does all by itself see nothing of it."""
    status = RequestStatus.FINISHED_ABORTED if case == "aborted" else RequestStatus.FINISHED_STOPPED
    request = request_of("first", {"do_remote_decode": case == "aborted"})
    assert finish(sides, request, status) is None


def test_words_that_no_engine_said_are_left_alone(sides: Sides) -> None:
    """The request is computed under its own name."""
    good = {"session_name": "sessions/a", "token_count": 1, "rank_count": 1}
    wrong: list[Any] = [
        7,
        "sessions/a",
        [],
        good | {"session_name": "sessions/../a"},
        good | {"session_name": 7},
        good | {"token_count": True},
        good | {"token_count": 0},
        good | {"token_count": "9"},
        good | {"rank_count": -1},
        good | {"rank_count": 1.5},
        good | {"engine_host": 7},
        good | {"engine_host": "x" * 256},
        {},
    ]
    for number, parts in enumerate(wrong):
        if parts:
            with pytest.raises(ValueError, match="ctxcache@here"):
                handover.read({"ctxcache@here": parts}, "here")
        says = {f"ctxcache@{sides.store.target}": parts, "session_id": f"own-{number}"}
        request = request_of(f"r{number}", says, number)
        assert until_known(sides, request)[0] == 0
        assert sides.scheduler._followed[request.request_id].asked.session_name == f"sessions/own-{number}"

"""Hints to the store, out of requests and of the waiting queue; counts of what came of them.

    request ── kv_hints, or kv_transfer_params ──► at once, or once its tokens are saved ──► HintService.Hint
    arrives, runs, leaves ──► the engine's queue ──► HintService.Schedule: the store fetches ahead of a turn

A hint changes no reply. A hint that vLLM or the store does not know is counted and left alone. Worst case: a
store that does not answer, which costs its hints; at most WAITING_LIMIT of them wait.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from pydantic import Field, TypeAdapter, ValidationError
from vllm.logger import init_logger

from ctxcache.client import CallerModel, Client, EngineQueue, QueuedJob
from ctxcache.client.types import HintAction, HintKind, HintOutcome
from ctxcache.errors import CacheError, DeadlineExceeded
from gpu_worker.engines.link import StoreLink
from gpu_worker.engines.names import session_id
from gpu_worker.engines.vllm.versions import hints_in

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.ctxcache")

# A hint's outcome, as `vllm:ctxcache_hints_total{hint, outcome}` counts it:
#
#     invalid, ignored      here: a payload that is wrong, an action of another component
#     unsent                here: no session, too many wait, closed
#     unanswered            the call took too long; the store may still carry it out
#     refused               the store raised
#     any other             the store's own word
VERSION = "1"
"""Version of the actions' payloads."""
ACTIONS_LIMIT = 32
"""Most actions of one request."""
WAITING_LIMIT = 1024

LONGEST_S = 3650 * 86400
"""The longest span that the store takes. A caller that gives a longer one may have given a time."""
SHOWN_CHARACTERS = 200
"""Most characters of a caller's words in a line of the log."""

Count = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]
Priority = Annotated[int, Field(ge=0, le=100, strict=True)]
Span = Annotated[float, Field(ge=0, le=LONGEST_S, allow_inf_nan=False, strict=True)]


class Action(msgspec.Struct):
    """An action, as vLLM has it where it knows hints."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class Envelope(msgspec.Struct):
    """The hints of a request, as vLLM has them where it knows hints."""

    protocol_version: str
    message_id: str
    actions: list[Action]


@dataclass(frozen=True, slots=True)
class Payload:
    """The payload of an action. Spans in seconds."""

    session: str | None = None
    """Another conversation than the request's own."""
    token_count: Count | None = None
    ttl_s: Span | None = None
    priority: Priority = 0
    budget_bytes: Count | None = None
    return_in_s: Span | None = None
    ended: bool = False
    computed_token_count: Count = 0
    used_token_count: Count = 0
    wasted_token_count: Count = 0


_PAYLOAD = TypeAdapter(Payload)


class HintTeller:
    """Tells the store hints, in a thread of its own, and counts outcomes. Thread-safe. Close it."""

    def __init__(self, link: StoreLink[CallerModel]) -> None:
        self._link = link
        # One thread: hints about a conversation reach the store in the order in which they were given.
        self._thread = ThreadPoolExecutor(1, "ctxcache-hints")
        self._lock = threading.Lock()
        """Over `_counts` and `_waiting_count`."""
        self._counts: Counter[str] = Counter()
        self._waiting_count = 0
        self._is_closing = self._is_unanswered = False

    def tell(self, hints: Iterable[HintAction], own_session: str = "") -> None:
        """Tell the store these hints, one by one, soon. `own_session`: for those that name none."""
        for hint in hints:
            action = hint if hint.session else replace(hint, session=own_session)
            if not action.session:
                self.count(action.kind.value, "unsent")
                continue
            with self._lock:
                # The pool's own queue has no bound.
                is_full = self._waiting_count >= WAITING_LIMIT
                self._waiting_count += not is_full
            if is_full:
                self.count(action.kind.value, "unsent")
                continue
            try:
                self._thread.submit(self._tell, action)
            except RuntimeError:
                # The pool is closed.
                self.count(action.kind.value, "unsent")

    def count(self, kind: str, outcome: str) -> None:
        """Count a hint's outcome."""
        with self._lock:
            self._counts[f"{kind}/{outcome}"] += 1

    def take_counts(self) -> dict[str, int]:
        """How many hints had which outcome, by `hint/outcome`, since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Tell what waits, while the store answers, and end the thread."""
        self._is_closing = True
        self._thread.shutdown()

    def _tell(self, action: HintAction) -> None:
        outcome = "unsent"
        try:
            used = self._link.use()
            # The engine's end must not wait for a thousand hints: one that is not answered is enough.
            if used is not None and not (self._is_closing and self._is_unanswered):
                (result,) = used[0].hints.give([action])
                outcome = result.outcome.name.lower() if isinstance(result.outcome, HintOutcome) else "other"
                self._is_unanswered = False
        except DeadlineExceeded:
            # The store goes on with the hint: a promotion may wait longer for room than a call may take.
            outcome = "unanswered"
            self._is_unanswered = True
        except CacheError as error:
            outcome = "refused"
            self._link.failed(error)
        except Exception:
            # The hint has words that no message can carry. The hints behind it are still told.
            outcome = "refused"
            logger.exception("a hint is not told")
        finally:
            with self._lock:
                self._waiting_count -= 1
            self.count(action.kind.value, outcome)


class WaitingQueue:
    """The requests that wait, as the store's queue of this engine. Thread-safe. Close it."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._queue: EngineQueue | None = None
        self._is_closed = False

    def waits(self, client: Client, model: CallerModel, job: QueuedJob) -> None:
        """Put a waiting request into the store's queue. Its session exists."""
        with self._lock:
            # A look-up may end behind `close`, and would make a queue that nobody withdraws.
            if self._is_closed:
                return
            if self._queue is None:
                self._queue = client.hints.engine_queue(self._engine, model_fingerprint=model.fingerprint)
        try:
            self._queue.put(job)
        except CacheError as error:
            logger.debug("request %s is not in the store's queue: %s", job.job_id, error)

    def started(self, request_id: str) -> None:
        """Tell the store that a request runs."""
        if self._queue is not None:
            with suppress(CacheError):
                self._queue.started(request_id)

    def left(self, request_id: str) -> None:
        """Tell the store that a request waits no more and will not run. Ignores an unknown request."""
        if self._queue is not None:
            with suppress(CacheError):
                self._queue.cancelled(request_id)

    def close(self) -> None:
        """Withdraw the queue."""
        with self._lock:
            self._is_closed = True
        if self._queue is not None:
            self._queue.close()


def hints_of(request: "Request", teller: HintTeller) -> list[HintAction]:
    """The hints of a request. A hint about the request's own session names no session.

    An invalid hint is counted, and logged with its field.
    """
    hints: list[HintAction] = []
    for action in _actions_of(request, teller):
        try:
            kind = HintKind(action.action_type)
        except ValueError:
            # The action is another component's.
            teller.count("other", "ignored")
            continue
        try:
            hints.append(_hint(kind, action))
        except ValueError as error:
            teller.count(kind.value, "invalid")
            logger.warning("a hint of a request: %s", str(error)[:SHOWN_CHARACTERS])
    if (request.kv_transfer_params or {}).get("ends") is True:
        hints.append(HintAction(HintKind.EXPECT, ""))
    return hints


def _actions_of(request: "Request", teller: HintTeller) -> Iterator[Action]:
    # Hints come in vLLM's own field, or within the parameters that callers hand through to a connector.
    given = [hints_in(request), (request.kv_transfer_params or {}).get("kv_hints")]
    actions: list[Action] = []
    for envelope in given:
        try:
            if envelope is not None:
                actions += msgspec.convert(envelope, Envelope, from_attributes=True).actions
        except msgspec.ValidationError as error:
            teller.count("other", "invalid")
            logger.warning("kv_hints of a request: %s", str(error)[:SHOWN_CHARACTERS])
    for _ in actions[ACTIONS_LIMIT:]:
        teller.count("other", "unsent")
    yield from actions[:ACTIONS_LIMIT]


def _hint(kind: HintKind, action: Action) -> HintAction:
    """The store's hint of an action. Raises ValueError, which names the field."""
    if action.action_version != VERSION:
        raise ValueError(f"action_version {action.action_version[:SHOWN_CHARACTERS]!r} is not {VERSION!r}")
    if unknown := set(action.payload) - set(Payload.__slots__):
        name = min(unknown)[:SHOWN_CHARACTERS]
        raise ValueError(f"payload: {name!r} is not one of {', '.join(Payload.__slots__)}")
    try:
        payload = _PAYLOAD.validate_python(action.payload)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False)
        raise ValueError(f"payload.{first['loc'][0]}: {first['msg']}") from None
    # One of the two is needed: neither says nothing of the return, and both contradict each other.
    if kind is HintKind.EXPECT and payload.ended == (payload.return_in_s is not None):
        raise ValueError("payload: either ended or return_in_s is needed")
    return HintAction(
        kind,
        f"sessions/{session_id(payload.session)}" if payload.session else "",
        token_count=payload.token_count,
        ttl=None if payload.ttl_s is None else timedelta(seconds=payload.ttl_s),
        priority=payload.priority,
        budget_bytes=payload.budget_bytes,
        return_in=None if payload.return_in_s is None else timedelta(seconds=payload.return_in_s),
        computed_token_count=payload.computed_token_count,
        used_token_count=payload.used_token_count,
        wasted_token_count=payload.wasted_token_count,
        action_id=action.action_id,
    )

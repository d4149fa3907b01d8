"""An adapter's settings, and its link to the store: made in the background, kept, made again when broken.

    CONNECTING ──registered──► READY ──a call failed──► RESTING ──pause──► CONNECTING
        │                        └── renewed ──► CONNECTING, with another subject
        └── the store has another model ──► REFUSED

An engine never waits for it: while it is not READY, nothing is looked up, restored or saved. REFUSED is for
good, and says why once. A caller that waits for something else of the store asks `answers` meanwhile: calls
that move rows may take longer than a store needs to say that it is there.
"""

import difflib
import enum
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from ctxcache.client import Client, ClientTls, connect
from ctxcache.client.client import check_target
from ctxcache.client.types import Durability
from ctxcache.errors import (
    CacheError,
    DeadlineExceeded,
    InvalidArgument,
    ModelFingerprintMismatch,
    ModelNotFound,
    ModelProbeMismatch,
    PermissionDenied,
    TlsFailed,
    Unauthenticated,
    Unavailable,
)
from ctxcache.format.ids import MODEL_ID
from gpu_worker.errors import UnsupportedArchitecture, UnsupportedDtype, WeightsNotVisible

log = logging.getLogger(__name__)

PAUSE_S = 2.0
"""Between a failure and the next try."""
CLOSE_S = 5.0
"""How long `close` waits for the thread: weights may take minutes to read, and a store may hang."""
HEARD_AFTER = 1.5
"""How much later than `within_s` who asks `answers` hears that the store does not answer, at most."""
LOOKUP_PART = 0.8
"""A look-up's part of `timeout_s`. In what is left a store is found out that hangs in the load."""
GONE = (Unavailable, DeadlineExceeded)
"""Errors of a store that does not answer, as opposed to one that says no."""
FINAL = (
    InvalidArgument,
    ModelFingerprintMismatch,
    ModelProbeMismatch,
    PermissionDenied,
    Unauthenticated,
    UnsupportedArchitecture,
    UnsupportedDtype,
    WeightsNotVisible,
)
"""Errors that another try would end in, too."""


Subject = TypeVar("Subject")
"""The subject of a link, which its calls name: a model, or a space of blocks."""
Result = TypeVar("Result")


class LinkState(enum.Enum):
    """Whether the store can be used."""

    CONNECTING = "connecting"
    READY = "ready"
    RESTING = "resting"
    REFUSED = "refused"


class StoreLink(Generic[Subject]):
    """A client of the store and what it is for. Thread-safe. Close it."""

    def __init__(
        self,
        connect: Callable[[], Client],
        describe: Callable[[Client], Subject],
        ask: Callable[[Client, Subject], object] = lambda _client, _subject: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to connect, in a thread. `describe` reads the model, which may take long once.

        `ask`: a call that a store answers at once, for `answers`.
        """
        self._connect, self._describe, self._ask, self._clock = connect, describe, ask, clock
        self._state, self._changed = LinkState.CONNECTING, threading.Condition()
        self._client: Client | None = None
        self._subject: Subject | None = None
        self._renewal_count = 0
        """Owned by `_changed`: how often the subject became another one."""
        self._is_wanted = True
        """Owned by `_changed`: whether there is a subject at all."""
        self._is_closed = False
        self._is_away = False
        """Whether the user heard that the store cannot be used, and not since that it is."""
        self._told: set[type[CacheError]] = set()
        """Owned by `_changed`: errors of which the user has heard."""
        self._met_at: set[tuple[str, int | None]] = set()
        """Owned by `_changed`: places of errors that nobody foresaw."""
        self._asked_s: float | None = None
        """Owned by `_changed`: when the store was asked the question that it has not answered."""
        self._answered_s = -math.inf
        self._thread = threading.Thread(target=self._run, name="ctxcache-link", daemon=True)
        self._thread.start()

    @property
    def state(self) -> LinkState:
        """Whether the store can be used now."""
        return self._state

    def wait(self, timeout_s: float) -> LinkState:
        """Wait until it is READY or REFUSED, or the time is over; what it is then."""
        with self._changed:
            ended = (LinkState.READY, LinkState.REFUSED)
            self._changed.wait_for(
                lambda: self._state in ended or self._is_closed or not self._is_wanted, timeout_s
            )
            return self._state

    def renew(self, *, is_wanted: bool = True) -> None:
        """Its subject is another one from now on: the store is not used before that is described.

        Not `is_wanted`: there is none, until it is renewed again.
        """
        with self._changed:
            self._renewal_count += 1
            self._is_wanted = is_wanted
            if self._state is not LinkState.REFUSED:
                self._turn(LinkState.CONNECTING)

    def use(self) -> tuple[Client, Subject] | None:
        """The client and what it is for; None unless it is READY."""
        with self._changed:
            if self._state is not LinkState.READY or self._client is None or self._subject is None:
                return None
            # Both by one look: the link may be made again between two.
            return self._client, self._subject

    def call(self, work: Callable[[Client, Subject], Result], otherwise: Result) -> Result:
        """The result of `work`; `otherwise` where the store cannot be used, or `work` fails in any way."""
        used = self.use()
        return otherwise if used is None else self.tried(lambda: work(*used), otherwise)

    def tried(self, work: Callable[[], Result], otherwise: Result) -> Result:
        """As `call`, of what a call has begun, whatever has become of the link meanwhile."""
        try:
            return work()
        except CacheError as error:
            self.failed(error)
        except Exception as error:
            # Engines call from threads that end by an error, and with whatever a request brought.
            if self._is_new(error):
                log.exception("a call of the context store failed, which is not said again")
        return otherwise

    def answers(self, since_s: float, within_s: float) -> bool:
        """Whether the store can be used; for a caller that has waited for it since then. Never waits.

        The link's thread asks the store, now and then. Where the answer takes longer than `within_s`, the
        store does not answer, see `failed`; a caller hears it HEARD_AFTER times as late at most.
        """
        with self._changed:
            now_s, pause_s = self._clock(), within_s / 4
            # A caller that waits since 0, with w = `within_s`; up to w/4 it costs the store nothing:
            #
            #     store is there    0 ── w/4: asked ─ answered ── w/4 later: asked ─ answered ── …
            #     store hangs       0 ── w/4: asked ─────────────────────── w later: it does not answer
            if self._state is not LinkState.READY or now_s - since_s < pause_s:
                return self._state is LinkState.READY
            if self._asked_s is None:
                if now_s - self._answered_s >= pause_s:
                    self._asked_s = now_s
                    self._changed.notify_all()
            # The question's own deadline may be longer than this caller waits.
            elif now_s - self._asked_s > within_s:
                self.failed(DeadlineExceeded(target="a question", timeout_s=f"{within_s:g}"))
            return self._state is LinkState.READY

    def failed(self, error: CacheError) -> None:
        """A call failed: say so once for each sort of error.

        Where the store does not answer, nothing asks it for a while, and the user hears of it each time.
        The same for one that came back empty and does not know the model any more: it is told anew.
        """
        with self._changed:
            # The first failed call of many turns the state; the others find it turned.
            if isinstance(error, (*GONE, ModelNotFound)):
                if self._state is LinkState.READY:
                    self._is_away = True
                    self._turn(LinkState.RESTING)
                    what = "does not answer" if isinstance(error, GONE) else "has lost the model"
                    log.warning("the context store %s, prompts are computed: %s", what, error)
            # Once for each class: a full store would otherwise fill the engine's log.
            elif type(error) not in self._told:
                self._told.add(type(error))
                log.warning("the context store refuses a call, which is not said again: %s", error)

    def _is_new(self, error: Exception) -> bool:
        """Whether an error that nobody foresaw is the first one from its place."""
        *_, last = traceback.extract_tb(error.__traceback__)
        with self._changed:
            is_new = (last.filename, last.lineno) not in self._met_at
            self._met_at.add((last.filename, last.lineno))
        return is_new

    def close(self) -> None:
        """End the thread, then the client; a thread in the middle of something closes the client itself."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._close_client()

    def _close_client(self) -> None:
        # Taken by one of two callers.
        with self._changed:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _run(self) -> None:
        try:
            self._keep()
        finally:
            # Not before `close`: callers may use the client of a link that is refused anew.
            if self._is_closed:
                self._close_client()

    def _turn(self, state: LinkState) -> None:
        self._state = state
        self._changed.notify_all()

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._has_work)
                if self._is_closed or self._state is LinkState.REFUSED:
                    return
                is_asked = self._state is LinkState.READY
                if self._state is LinkState.RESTING:
                    end_s = time.monotonic() + PAUSE_S
                    # A pause that `close` ends: a bare sleep would hold up the end of the engine.
                    self._changed.wait_for(lambda: self._is_closed, end_s - time.monotonic())
                    self._state = LinkState.CONNECTING
                    continue
            if is_asked:
                self._pulse()
                continue
            renewal_count = self._renewal_count
            state = self._try()
            with self._changed:
                # Its engine has ended meanwhile.
                if self._is_closed:
                    return
                # The subject became another one while it was described.
                if self._renewal_count != renewal_count:
                    continue
                self._asked_s = None
                self._turn(state)

    @property
    def _has_work(self) -> bool:
        return self._asked_s is not None if self._state is LinkState.READY else self._is_wanted

    def _pulse(self) -> None:
        self.call(self._ask, None)
        with self._changed:
            self._asked_s, self._answered_s = None, self._clock()

    def _try(self) -> LinkState:
        try:
            # Kept over failures: gRPC connects anew by itself.
            if self._client is None:
                self._client = self._connect()
            self._subject = self._describe(self._client)
            # A subject may be described without a call: a store that hangs would look ready each time.
            self._ask(self._client, self._subject)
        except (*FINAL, Refused) as error:
            log.error("the context store is not used: %s", error)  # noqa: TRY400  its reason is the message
            return LinkState.REFUSED
        except CacheError as error:
            # A client reads its files once: renewed ones are read by the next.
            if isinstance(error, TlsFailed):
                self._close_client()
            if not self._is_away:
                self._is_away = True
                log.warning("the context store cannot be used yet, prompts are computed: %s", error)
            return LinkState.RESTING
        except Exception:
            # Libraries that read models raise whatever they like; the engine goes on without a store.
            if not self._is_closed:
                log.exception("the context store is not used: the model could not be described")
            return LinkState.REFUSED
        self._is_away = False
        log.info("the context store is used")
        return LinkState.READY


# Bytes that come late, and an owner of memory who waits no longer:
#
#     who brings them    read ─ [write] ─ read ─ [write] ─ read ─ raises: writes no more
#     the owner                                give_up waits ──►│ the memory is its own
class Bringing:
    """Bytes on their way into memory that its owner may take back."""

    def __init__(self, name: str) -> None:
        self.begun_s = time.monotonic()
        self.is_given_up = False
        self.lock = threading.Lock()
        """Held while the memory is written to, and while the end of it is decided."""
        self._name = name

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within it the memory is written to. Raises DeadlineExceeded once it is given up."""
        with self.lock:
            if self.is_given_up:
                raise DeadlineExceeded(target=self._name, timeout_s="its time is over")
            yield

    def give_up(self) -> None:
        """From here on the memory is not written to."""
        with self.lock:
            self.is_given_up = True


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Level = Literal["memory", "disk"]


class Refused(ValueError):
    """A configuration that cannot be followed; the message says which part of it, and what would do."""


def check_names(given: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raise Refused for a name that is none: a setting that is misspelt must not be passed over."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise Refused(f"{where}.{name}: not one of {', '.join(known)}{meant}")


def _checked(target: str) -> str:
    check_target(target)
    return target


Target = Annotated[str, AfterValidator(_checked)]
ModelId = Annotated[str, Field(pattern=f"^{MODEL_ID.pattern}$")]


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where the store is, and how the adapter keeps what it saves. Each adapter adds its own."""

    target: Target = "127.0.0.1:7420"
    token_file: str | None = None
    tls_ca: str | None = None
    """Who signed the store's certificate, a PEM file; `system`: one of the machine's own authorities.

    This and the three below have the names of the command line's options. Without any the link is plaintext.
    """
    tls_client_certificate: str | None = None
    tls_client_key: str | None = None
    tls_server_name: str | None = None
    durability: Level = "memory"
    ttl_s: Seconds | None = None
    """How long what is saved is kept after its last access; by default as long as there is room."""
    timeout_s: Seconds = 1.0
    """Longest time of one call, in seconds."""
    weights_version: str = ""
    """The caller's name for the weights that are loaded: other weights under the same files find nothing."""

    @classmethod
    def names(cls) -> list[str]:
        """The settings' names."""
        return [field.name for field in fields(cls)]

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Self:
        """The settings that a configuration gives at `where`. Raises Refused."""
        # Before pydantic, whose error would not name the nearest.
        check_names(given, cls.names(), where)
        try:
            return TypeAdapter(cls).validate_python(dict(given))
        except ValidationError as error:
            (first, *_) = error.errors(include_url=False)
            name = ".".join(map(str, first["loc"][:1]))
            raise Refused(f"{where}.{name}: {first['msg']}, not {first['input']!r}") from None
        except InvalidArgument as error:
            raise Refused(f"{where}.{error}") from None

    @property
    def answer_s(self) -> float:
        """How long a store that answers may take to say so: a request hears of it within `timeout_s`."""
        return self.timeout_s / 2

    def answer_after_s(self, waited_s: float) -> float:
        """`answer_s` for a request that was held up before: it hears within what is left of `timeout_s`."""
        return min(self.answer_s, max(0.0, self.timeout_s - waited_s) / HEARD_AFTER)

    @property
    def level(self) -> Durability:
        """The durability, as the client names it."""
        return Durability[self.durability.upper()]

    def connect(self) -> Client:
        """A client of that store."""
        tls = ClientTls.of(
            self.tls_ca, self.tls_client_certificate, self.tls_client_key, self.tls_server_name
        )
        return connect(self.target, token_file=self.token_file, timeout_s=self.timeout_s, tls=tls)

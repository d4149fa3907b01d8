"""Several real stores on one machine, one bucket for all, and what their users know of every session.

Each store is a process with a data directory of its own. A user's turn reads the session at one store,
compares every row with what was acknowledged before, and appends. Rows are made from the session and the
token, so that a row of another session, or of another place, is never taken for the right one.
"""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from ctxcache.client import OPAQUE, TOKENS, CallerModel, Client, Durability, ModelSpec, connect
from ctxcache.errors import GenerationMismatch, SessionNotFound
from tests.faults.planted import forked
from tests.server_process import FORKED, ServerProcess, write_secret

ROW_BYTES = 512
SPEC = ModelSpec.opaque("small", row_bytes=ROW_BYTES)
BEAT_S = 0.5


class WrongRows(AssertionError):
    """A store showed other rows than its user had stored."""


class Stores:
    """The stores of one fleet. A context manager: on leaving, all are killed."""

    def __init__(
        self,
        directory: Path,
        count: int,
        *options: str,
        bucket: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self.bucket = bucket or f"file://{directory}/bucket"
        self._secret = directory / "secret"
        write_secret(self._secret, "a secret of this fleet of stores")
        self._options, self._environment = options, environment
        self.processes: list[ServerProcess] = []
        for _ in range(count):
            self.add_process()
        self.clients: list[Client] = []
        self.models: list[CallerModel] = []

    def add_process(
        self, *options: str, environment: dict[str, str] | None = None, plants: Sequence[str] = ()
    ) -> ServerProcess:
        """One more store, which is not started. `plants`: bugs that it has."""
        process = ServerProcess(
            self._directory / f"store{len(self.processes)}",
            *("--fleet-bucket", self.bucket, "--fleet-secret-file", str(self._secret)),
            *("--fleet-beat-s", str(BEAT_S), *self._options, *options),
            environment=environment or self._environment,
            program=forked(plants) if plants else FORKED,
        )
        self.processes.append(process)
        return process

    def __enter__(self) -> Self:
        for process in self.processes:
            process.start()
        for number in range(len(self.processes)):
            self.clients.append(self._connect(number))
            self.models.append(self.clients[-1].models.register(SPEC))
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGCONT)
            process.__exit__(None, None, None)

    def _connect(self, number: int) -> Client:
        return connect(self.processes[number].target, timeout_s=20)

    def add(self, *, plants: Sequence[str] = ()) -> int:
        """One more store; its number."""
        self.add_process(plants=plants).start()
        number = len(self.processes) - 1
        self.clients.append(self._connect(number))
        self.models.append(self.clients[number].models.register(SPEC))
        return number

    def restart(self, number: int) -> None:
        """Start a store again that was killed or stopped."""
        self.processes[number].start()
        self.clients[number].close()
        self.clients[number] = self._connect(number)
        self.models[number] = self.clients[number].models.register(SPEC)

    @contextlib.contextmanager
    def frozen(self, number: int) -> Iterator[None]:
        """A store that neither works nor answers within the block."""
        self.processes[number].signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.processes[number].signal(signal.SIGCONT)


def rows_of(session_id: str, begin: int, count: int, take: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and rows of a session's tokens; `take` makes others of the same places."""
    seed = abs(hash_of(f"{session_id}/{take}"))
    tokens = (np.arange(begin, begin + count, dtype=np.int64) * 2654435761 + seed) % (1 << 30)
    column = np.arange(ROW_BYTES, dtype=np.int64)
    rows = (tokens[:, None] * 31 + column[None, :] * 7 + seed) % 251
    return tokens.astype(np.int32), rows.astype(np.uint8)


def hash_of(text: str) -> int:
    """A number of a text, the same in every process."""
    return int.from_bytes(text.encode(), "little") % 1_000_003


class User:
    """One conversation, and what its user was told of it.

    A turn without an answer may have been stored or not. The next one says something else at the same place,
    so that a store which goes on with what another one has superseded is found out.
    """

    def __init__(self, stores: Stores, session_id: str) -> None:
        self._stores, self.session_id = stores, session_id
        self.name = f"sessions/{session_id}"
        self.tokens = np.empty(0, np.int32)
        self.rows = np.empty((0, ROW_BYTES), np.uint8)
        self._said: list[tuple[np.ndarray, np.ndarray]] = []
        """Every conversation that was ever sent to a store, answered or not."""
        self._unanswered: list[tuple[np.ndarray, np.ndarray]] = []
        """Those of them that may be there: since the last answer."""
        self.shared_count = 0
        """Tokens that were acknowledged as shared, since it was cut or deleted last."""
        self.takes = 0
        self.computed = 0
        """Tokens that were lost, and computed again."""
        self.outdated = 0
        """Turns that found what another store had superseded, and cut it."""

    def go_over_to(self, stores: Stores) -> None:
        """Talk to other stores from here on."""
        self._stores = stores

    def found(self, number: int, *, may_be_outdated: bool = False) -> int:
        """How many tokens a store has of it; every row is compared.

        `may_be_outdated`: a fault hides what went on elsewhere. What was said before counts as found then, up
        to where the user went on otherwise. Raises WrongRows, CacheError.
        """
        client, model = self._stores.clients[number], self._stores.models[number]
        try:
            session = client.sessions.open(client.sessions.get(self.name), model)
        except SessionNotFound:
            return 0
        if not session.info.token_count:
            return 0
        with session.read() as read:
            count = read.token_count
            tokens = read.array(TOKENS).view(np.int32).reshape(-1)
            rows = read.array(OPAQUE)
        for known_tokens, known_rows in ((self.tokens, self.rows), *self._unanswered):
            if np.array_equal(tokens, known_tokens[:count]) and np.array_equal(rows, known_rows[:count]):
                self.tokens, self.rows = known_tokens, known_rows
                return int(count)
        is_said = any(
            np.array_equal(tokens, said_tokens[:count]) and np.array_equal(rows, said_rows[:count])
            for said_tokens, said_rows in self._said
        )
        if not (may_be_outdated and is_said):
            what = "what it said before" if is_said else "what nobody said"
            raise WrongRows(
                f"{self.name} at store {number}: {count} tokens, {len(self.tokens)} known: {what}"
            )
        self.outdated += 1
        shorter = min(count, len(self.tokens))
        same = tokens[:shorter] == self.tokens[:shorter]
        common = shorter if same.all() else int(np.argmin(same))
        self.shared_count = min(self.shared_count, common)
        session.keep_first(common)
        return common

    def turn(
        self,
        number: int,
        count: int = 70,
        *,
        may_be_outdated: bool = False,
        durability: Durability = Durability.MEMORY,
    ) -> int:
        """A turn at a store: what is lacking is computed again, `count` new tokens are appended.

        Returns how many tokens were found. Raises WrongRows, CacheError.
        """
        client, model = self._stores.clients[number], self._stores.models[number]
        found = self.found(number, may_be_outdated=may_be_outdated)
        self.takes += 1
        new = rows_of(self.session_id, len(self.tokens), count, self.takes)
        tokens, rows = np.concatenate([self.tokens, new[0]]), np.concatenate([self.rows, new[1]])
        session = client.sessions.create(model, id=self.session_id, exist_ok=True)
        # It may have come from elsewhere since it was read, as far as others had it.
        if session.info.token_count != found:
            raise GenerationMismatch(f"{self.name} has changed since it was read")
        # Noted before they are stored: without an answer, they may be there.
        self._unanswered.append((tokens, rows))
        self._said.append((tokens, rows))
        generation = session.info.generation
        session.append(
            {TOKENS: tokens[found:], OPAQUE: rows[found:]},
            durability=durability,
            if_generation_match=generation,
        )
        self.computed += len(self.tokens) - found
        self.tokens, self.rows = tokens, rows
        if durability is Durability.SHARED:
            self.shared_count = len(tokens)
        self._unanswered.clear()
        return found

    def delete(self, number: int) -> None:
        """Delete the session at a store."""
        self.shared_count = 0
        self._stores.clients[number].sessions.open(self.name).delete()
        self._unanswered.clear()
        self.tokens, self.rows = self.tokens[:0], self.rows[:0]

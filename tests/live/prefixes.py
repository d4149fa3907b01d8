"""One load of prompts that begin alike through a running store's sessions, and through the simulator.

As an engine does that knows conversations: a turn goes on with its session where the store has that, else
the session is made, and begins with as much of the prompt as any other session has. Every row that is found
is compared; the rest is appended. A block of the trace is 64 tokens here, whose ids and rows follow from its
name.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import ctxcache
from ctxcache.client import Client, SessionHandle
from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.served import RANKED
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.streams import TOKENS, StreamSpec
from ctxcache.settings.config import Settings
from ctxcache.simulate.blocks import BlockReplay
from ctxcache.simulate.load import Load, TraceHint
from ctxcache.simulate.rows import TraceTurn
from ctxcache.simulate.study import look
from ctxcache.simulate.trace import BLOCK_TOKENS
from tests.faults.rows import Rows, rows_of
from tests.live.engine import LAYOUT, MODEL, OWN, SLOT_BYTES, STORED, TOKEN_BYTES
from tests.live.running import RunningServer, store_settings


@dataclass(frozen=True, slots=True)
class Setting:
    """Slots of 64 tokens that each tier takes."""

    policy: str
    dram_segments: int = 128
    ssd_segments: int = 2048
    hints: frozenset[TraceHint] = frozenset()

    def settings(self, directory: Path) -> Settings:
        """A server of that size."""
        return store_settings(
            directory,
            self.policy,
            dram_bytes=self.dram_segments * SLOT_BYTES,
            ssd_bytes=self.ssd_segments * SLOT_BYTES,
        )

    def load(self) -> Load:
        """The simulator's load: blocks that lie on SSD, which has what memory has too."""
        dram_bytes = self.dram_segments * SLOT_BYTES
        return Load(
            token_bytes=TOKEN_BYTES,
            dram_bytes=dram_bytes,
            ssd_bytes=self.ssd_segments * SLOT_BYTES - dram_bytes,
            hints=self.hints,
        )


def named_blocks(turns: Iterable[TraceTurn]) -> Iterator[TraceTurn]:
    """The turns of a trace that names its blocks, as far as their prompts fill blocks."""
    for turn in turns:
        history_tokens = turn.history_tokens or 0
        blocks = (turn.blocks or ())[: (history_tokens + turn.input_tokens) // BLOCK_TOKENS]
        had_count = min(history_tokens // BLOCK_TOKENS, len(blocks))
        if blocks:
            yield turn._replace(
                blocks=blocks,
                input_tokens=(len(blocks) - had_count) * BLOCK_TOKENS,
                history_tokens=had_count * BLOCK_TOKENS,
            )


def scaled(turns: Iterable[TraceTurn]) -> list[TraceTurn]:
    """The turns with blocks of 64 tokens, and answers without any."""
    found = []
    for turn in turns:
        new_count = turn.input_tokens // BLOCK_TOKENS
        had_count = len(turn.blocks or ()) - new_count
        found.append(
            turn._replace(
                input_tokens=new_count * SEGMENT_TOKENS,
                output_tokens=0,
                history_tokens=had_count * SEGMENT_TOKENS,
            )
        )
    return found


def live(turns: Sequence[TraceTurn], setting: Setting, directory: Path) -> list[int]:
    """By turn, how many of the first blocks a running store had."""
    next_arrivals_s = look(turns) if setting.hints else None
    found_counts: list[int] = []
    with (
        RunningServer(setting.settings(directory)) as server,
        ctxcache.connect(server.target) as client,
    ):
        client.models.register(MODEL)
        for number, turn in enumerate(turns):
            server.set_time(turn.arrival_s)
            found_counts.append(_play(client, turn))
            if next_arrivals_s is not None and next_arrivals_s[number] == float("inf"):
                client.hints.expect(_name(turn), None)
            server.rest()
    return found_counts


def simulated(turns: Sequence[TraceTurn], setting: Setting) -> list[int]:
    """The same in the simulator."""
    load = setting.load()
    made = RANKED[setting.policy](Capacities(load.dram_bytes, load.ssd_bytes))
    next_arrivals_s = look(turns) if setting.hints else None
    replay = BlockReplay(load, made, SEGMENT_TOKENS, next_arrivals_s=next_arrivals_s)
    found_counts: list[int] = []
    replay.store.found = _noted(replay.store.found, found_counts)  # type: ignore[assignment,method-assign]
    replay.run(turns)
    return found_counts


def _play(client: Client, turn: TraceTurn) -> int:
    blocks = turn.blocks or ()
    session = _going_on(client, turn) or _begun(client, turn, blocks)
    found = session.info.token_count // SEGMENT_TOKENS
    if found:
        with session.read() as rows:
            for spec in STORED:
                expected = np.concatenate([_rows(block, spec) for block in blocks[:found]])
                assert np.array_equal(rows.array(spec.stream), expected), f"{turn.session!r}: {spec.stream}"
    if found < len(blocks):
        with session.writer((len(blocks) - found) * SEGMENT_TOKENS) as writer:
            for spec in STORED:
                writer.write(spec.stream, 0, np.concatenate([_rows(each, spec) for each in blocks[found:]]))
            writer.commit()
    return found


def _going_on(client: Client, turn: TraceTurn) -> SessionHandle | None:
    """The turn's session where the store has tokens of it."""
    (known,) = client.sessions.lookup([(_name(turn), MODEL.fingerprint())])
    return client.sessions.open(_name(turn), OWN) if known.token_count else None


def _begun(client: Client, turn: TraceTurn, blocks: Sequence[bytes]) -> SessionHandle:
    layout = [spec.stream for spec in LAYOUT.specs]
    session = client.sessions.create(OWN, id=_id(turn), layout=layout)
    session.adopt([int(each) for block in blocks for each in _ids(block)])
    return session


def _noted(
    found: Callable[[tuple[bytes, ...]], int], counts: list[int]
) -> Callable[[tuple[bytes, ...]], int]:
    def noted(asked: tuple[bytes, ...]) -> int:
        counts.append(found(asked))
        return counts[-1]

    return noted


def _id(turn: TraceTurn) -> str:
    return turn.session.decode().replace(" ", "-")


def _name(turn: TraceTurn) -> str:
    return f"sessions/{_id(turn)}"


def _ids(block: bytes) -> npt.NDArray[np.int32]:
    """The token ids of a block, [64]."""
    drawn = hashlib.shake_128(block).digest(4 * SEGMENT_TOKENS)
    return np.frombuffer(drawn, np.int32) & 0x3FFFFFFF


def _rows(block: bytes, spec: StreamSpec) -> Rows:
    """The rows of a block in one stream, [64, row_bytes]."""
    if spec.stream == TOKENS:
        return _ids(block).view(np.uint8).reshape(SEGMENT_TOKENS, 4)
    return rows_of(zlib.crc32(block) >> 1, spec.stream, 0, SEGMENT_TOKENS, spec.row_bytes)

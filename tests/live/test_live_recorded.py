"""A recording of a running store is its load: replayed and simulated it comes to the same."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

import ctxcache
from ctxcache.simulate.recorded import Called, contents
from ctxcache.simulate.trace import Trace, TraceTurn
from lab.replay.replay import replay
from tests.live.compare import Outcome, Setting, Sizes, differences, live, simulated
from tests.live.engine import SLOT_BYTES, TOKEN_BYTES
from tests.live.load import Shape, make_turns
from tests.live.recording import Stepped, recorded
from tests.live.running import RunningServer

SETTING = Setting(Sizes(48, 192), "value")


@pytest.fixture(scope="module")
def load() -> Sequence[TraceTurn]:
    """Turns that fill both tiers."""
    return make_turns(Shape(session_count=36))


@pytest.fixture(scope="module")
def recording(load: Sequence[TraceTurn], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The load through a store that is recorded, and where its turns found their sessions."""
    directory = tmp_path_factory.mktemp("recorded")
    path = directory / "calls.jsonl.gz"
    with (
        RunningServer(SETTING.settings(directory / "data")) as server,
        ctxcache.connect(server.target) as client,
        recorded(server.target, path),
    ):
        running, _ = live(load, SETTING, server, client)
    return path, running


def test_its_turns_are_those_of_the_load(load: Sequence[TraceTurn], recording: tuple[Path, Outcome]) -> None:
    """Every arrival, every history and every token, though sessions were lost and written anew; no name."""
    path, _ = recording
    sizes: dict[bytes, int] = {}
    expected = []
    for turn in load:
        before = sizes.get(turn.session, 0)
        sizes[turn.session] = before + turn.input_tokens + turn.output_tokens
        expected.append((turn.arrival_s, before, sizes[turn.session] - before))

    found = list(Trace(path))

    assert [(turn.arrival_s, turn.history_tokens, turn.input_tokens) for turn in found] == expected
    names = dict(zip((turn.session for turn in load), (turn.session for turn in found), strict=True))
    assert [names[turn.session] for turn in load] == [turn.session for turn in found]
    assert len(set(names.values())) == len(names)
    assert not set(names) & set(names.values())


def test_simulate_says_of_it_what_the_store_did(recording: tuple[Path, Outcome]) -> None:
    """Turn by turn, in which tier; and it names the store's sizes."""
    path, running = recording
    expected = simulated(list(Trace(path)), SETTING)
    nameless = Outcome(
        tuple((session, tier) for (session, _), (_, tier) in zip(expected.found, running.found, strict=True)),
        running.waits_s, running.tally, running.evicted_count, running.written_bytes,
    )  # fmt: skip
    options = contents(path).simulate_options()

    assert len(differences(nameless, expected)) <= len(running.found) / 100
    assert min(running.counts().values()) > len(running.found) / 50
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        "--dram": str(48 * SLOT_BYTES), "--ssd": str(144 * SLOT_BYTES), "--token-bytes": str(TOKEN_BYTES),
        "--ttl": "86400s", "--policies": "value",
    }  # fmt: skip


def test_a_store_of_the_same_size_gives_the_same_hits(
    recording: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """Look-ups and reads by tier, evictions and tokens: what is played is asked again, with other rows."""
    path, running = recording
    with RunningServer(SETTING.settings(tmp_path / "data")) as server:
        outcome = replay(path, lambda: ctxcache.connect(server.target), make_due=lambda _: Stepped(server))

    assert outcome.replayed.found == outcome.recorded.found
    assert outcome.recorded.calls["evict"] == outcome.replayed.calls["evict"] == running.evicted_count
    assert outcome.recorded.appended_tokens == outcome.replayed.appended_tokens
    assert outcome.recorded.read_tokens == outcome.replayed.read_tokens > outcome.replayed.dram_tokens > 0
    assert outcome.uncounted_calls == 0
    assert set(outcome.errors) <= {("get", "SESSION_NOT_FOUND")}


def test_a_store_with_less_memory_hits_less(recording: tuple[Path, Outcome], tmp_path: Path) -> None:
    """A lost session is written anew, with all that it had."""
    path, _ = recording
    smaller = Setting(Sizes(48, 96), "value")
    with RunningServer(smaller.settings(tmp_path / "data")) as server:
        outcome = replay(path, lambda: ctxcache.connect(server.target), make_due=lambda _: Stepped(server))

    hits = [
        sum(tally.found["read", tier] for tier in ("dram", "ssd"))
        for tally in (outcome.recorded, outcome.replayed)
    ]
    assert 0 < hits[1] < hits[0]
    assert outcome.replayed.calls["evict"] > outcome.recorded.calls["evict"]
    assert outcome.replayed.appended_tokens > outcome.recorded.appended_tokens
    assert outcome.errors["read", "SESSION_NOT_FOUND"] == hits[0] - hits[1]


class _PressesCtrlC:
    """Ctrl-C comes while it is dropped, where Python forgets what a signal raises."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_that_comes_while_an_object_is_dropped_ends_a_replay(
    recording: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """No call is played behind it, and what was played until then is told."""
    path, _ = recording

    class Pressing(Stepped):
        """Ctrl-C before the tenth call."""

        def wait(self, call: Called) -> None:
            """See Due."""
            super().wait(call)
            waited.append(call)
            if len(waited) == 10:
                _PressesCtrlC()

    waited: list[Called] = []
    with RunningServer(SETTING.settings(tmp_path / "data")) as server:
        outcome = replay(path, lambda: ctxcache.connect(server.target), make_due=lambda _: Pressing(server))

    assert len(waited) == 10
    assert outcome.recorded.calls.total() <= 9
    assert outcome.took_s > 0

"""Random walks of many turns: whatever became of a session, each turn begins on the right cache.

`WALKS=500 pytest tests/gpu_worker/engines/test_many_turns.py` walks for long; a walk's number is its seed.
"""

import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache

import pytest
import torch
from kept_sessions import Kept, fresh
from server_process import ServerProcess
from sessions import made_once
from stored_model import stored_model
from tiny_models import VOCABULARY_SIZE
from transformers import Cache

import ctxcache
from ctxcache.client import Client
from ctxcache.format.model import ModelSpec
from ctxcache.format.packing import PACKINGS
from ctxcache.format.streams import TOKENS, StateKind
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import FAST, Start, Steps
from gpu_worker.families.generation import common_prefix, fit, prefill
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.pipeline import PipelineSettings
from gpu_worker.planning.plan import RestorePlan
from gpu_worker.planning.profile import Link, Profile

WALKS = int(os.environ.get("WALKS", "4"))
STEPS = 30
WINDOW = 150
EXACT_BOUND = 1e-5
LOSSY_BOUNDS = {
    StateKind.KV_INT8: 0.01,
    StateKind.HIDDEN_INT8: 0.02,
    StateKind.KV_INT4: 0.1,
    StateKind.HIDDEN_INT4: 0.2,
}
"""By how much a layer from packed rows may differ from what was packed."""
EXACT_PLANS = [
    "kv:0-2",
    "hidden:0-2",
    "tokens:0-2",
    "tokens:0,kv:1-2",
    "tokens:0-1,hidden:2",
    "hidden:0,kv:1,hidden:2",
]
LOSSY_PLANS = [
    "kv_int8:0-2",
    "hidden_int8:0-2",
    "kv_int4:0,hidden:1,kv_int8:2",
    "tokens:0,hidden_int8:1,kv:2",
    "hidden_int4:0-2",
]
TIGHT = PipelineSettings(slot_bytes=8192, slot_count=2, batch_tokens=16, is_poisoned=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A store whose arena holds a part of a walk's sessions."""
    torch.set_num_threads(1)
    with ServerProcess(tmp_path_factory.mktemp("store") / "data", "--arena-size-bytes", "6MiB") as running:
        yield running


_model, _adapter = made_once()


@cache
def _spec(name: str, *, is_lossy: bool) -> ModelSpec:
    kinds = PACKINGS if is_lossy else ()
    return model_spec(_model(name), model_id=f"walk-{name}-{is_lossy}", packed_kinds=kinds)


class _Engine(TransformersEngine):
    """Keeps what its last turn began with."""

    start: Start

    def _generate(
        self,
        start: Start,
        token_ids: Sequence[int],
        max_new_tokens: int,
        eos_token_ids: Collection[int] | None,
        steps: Steps = FAST,
    ) -> Iterator[int]:
        self.start = start
        yield from super()._generate(start, token_ids, max_new_tokens, eos_token_ids, steps)


class _Walk:
    """One model's sessions, their engines, and whoever else comes to the store. `story` is what it did."""

    def __init__(self, seed: int, clients: Sequence[Client]) -> None:
        self.random = random.Random(seed)
        self._clients, self._seed = clients, seed
        self._is_lossy = bool(seed % 2)
        self._name = self.random.choice(["llama", "qwen3"])
        self._model, self._spec = _model(self._name), _spec(self._name, is_lossy=self._is_lossy)
        self._kept: dict[str, Kept] = {}
        self._plans: dict[str, str] = {}
        """The plan that each session was created by."""
        self.reused_count = 0
        self.story: list[str] = []

    def step(self) -> None:
        """A turn, most often; else something happens to a session."""
        others: list[Callable[[str], None]] = [self._demote, self._fork, self._keep_recent, self._keep_first]
        if self._kept and self.random.random() < 0.4:
            self.random.choice(others)(self.random.choice(list(self._kept)))
        elif self.random.random() < 0.2 or not self._kept:
            self._turn(f"{self._seed}-{len(self._kept)}")
        else:
            self._turn(self.random.choice(list(self._kept)))

    @property
    def _client(self) -> Client:
        return self.random.choice(self._clients)

    def _ids(self, most: int, least: int = 0) -> list[int]:
        return [self.random.randrange(VOCABULARY_SIZE) for _ in range(self.random.randint(least, most))]

    # -- what happens between turns ----------------------------------------------------------------

    def _demote(self, session_id: str) -> None:
        self.story.append(f"demote {session_id}")
        self._client.admin.demote_session(f"sessions/{session_id}")

    def _fork(self, session_id: str) -> None:
        fork_id = f"{self._seed}-{len(self._kept)}"
        self.story.append(f"fork {session_id} {fork_id}")
        self._client.sessions.open(f"sessions/{session_id}").fork(id=fork_id)
        self._kept[fork_id], self._plans[fork_id] = self._kept[session_id], self._plans[session_id]

    def _keep_recent(self, session_id: str) -> None:
        kept = self._kept[session_id]
        count = len(kept.token_ids)
        sinks = self.random.choice([0, 4])
        recent = self.random.randint(0, max(count - sinks, 0))
        self.story.append(f"keep_recent {session_id} {sinks}+{recent} of {count}")
        self._client.sessions.open(f"sessions/{session_id}").keep_recent(recent, sink_token_count=sinks)
        indexes = [*range(min(sinks, count)), *range(max(count - recent, min(sinks, count)), count)]
        self._kept[session_id] = kept.only(indexes, self._model)

    def _keep_first(self, session_id: str) -> None:
        kept = self._kept[session_id]
        count = self.random.randint(0, len(kept.token_ids))
        self.story.append(f"keep_first {session_id} {count} of {len(kept.token_ids)}")
        self._client.sessions.open(f"sessions/{session_id}").keep_first(count)
        self._kept[session_id] = kept.first(count)

    # -- turns -------------------------------------------------------------------------------------

    def _turn(self, session_id: str) -> None:
        kept = self._kept.get(session_id, Kept([], []))
        history, new, reply_count = self._history(kept), self._ids(40, 1), self.random.randint(0, 4)
        sinks = self.random.choice([0, 4])
        client = self._client
        with self._engine(client, session_id, sinks) as engine:
            self.story.append(
                f"turn {session_id} history {history and len(history)} of {len(kept.token_ids)} new"
                f" {len(new)}"
            )
            turn = engine.turn(session_id, new, max_new_tokens=reply_count, history=history, eos_token_ids=())
            assert engine.wait(session_id) is None
        start, all_cached = engine.start, engine.start.cache
        expected, prefilled = self._begins_on(kept, history, len(new) + reply_count, sinks)
        count = len(expected.token_ids)
        self.reused_count += count
        assert turn.reused_token_count == count
        assert turn.miss_reason in ("", "SESSION_NOT_FOUND")

        self._check_restored(start, expected, all_cached)
        self._check_computed(count, [*prefilled, *new], turn.token_ids, all_cached)
        token_ids = [*expected.token_ids, *prefilled, *new, *turn.token_ids]
        name = f"sessions/{session_id}"
        with client.sessions.open(name, stored_model(client, name)).read(streams=[TOKENS]) as rows:
            assert rows.token_ids() == token_ids
        # Rows saved earlier stay as they were saved, whatever this turn made of them.
        self._kept[session_id] = expected.and_then(Kept.of_cache(token_ids, all_cached))

    def _engine(self, client: Client, session_id: str, sinks: int) -> _Engine:
        plans = [*EXACT_PLANS, *(LOSSY_PLANS if self._is_lossy else [])]
        text = self.random.choice([*plans, "", ""])
        if self.random.random() < 0.5:
            text = self._plans.get(session_id, text)
        self._plans.setdefault(session_id, text)
        profile = self._profile()
        self.story.append(f"by {text or profile}")
        return _Engine(
            _adapter(self._name),
            client,
            self._spec,
            RestorePlan.parse(text) if text else None,
            profile=profile,
            settings=TIGHT,
            window=WINDOW,
            sink_count=sinks,
        )

    def _profile(self) -> Profile:
        """A machine on which copying a tiny model's rows takes about as long as computing them."""
        link = Link(10 ** self.random.uniform(5, 8))
        flops_per_s = link.bytes_per_s * 10 ** self.random.uniform(1, 4)
        return Profile(
            name="drawn",
            copy=link,
            ssd=link,
            remote=link,
            gemm_flops_per_s=flops_per_s,
            attention_flops_per_s=flops_per_s / 2,
            memory_bytes_per_s=100 * link.bytes_per_s,
        )

    def _history(self, kept: Kept) -> list[int] | None:
        """As the caller knows it: not at all, as it is, shorter, longer, or another from some token on."""
        ids = kept.token_ids
        part = ids[: self.random.randint(0, len(ids))]
        return self.random.choice([None, None, ids, part, [*part, *self._ids(20)], [*ids, *self._ids(20)]])

    def _begins_on(
        self, kept: Kept, history: list[int] | None, new_count: int, sinks: int
    ) -> tuple[Kept, list[int]]:
        """The cache that a turn has to restore, and the tokens of its history that it has to compute."""
        count = len(kept.token_ids) if history is None else len(history)
        known = kept.token_ids if history is None else history
        if (cut := fit(count, new_count, window=WINDOW, sink_count=sinks)) is not None:
            known = cut.apply(known)
            if len(kept.token_ids) == count:
                kept = kept.only(cut.apply(range(count)), self._model)
        common = common_prefix(kept.token_ids, known)
        return kept.first(common), known[common:]

    def _check_restored(self, start: Start, expected: Kept, found: Cache) -> None:
        if start.restoring is None:
            assert not expected.token_ids
            return
        schedule = start.restoring.restoration.schedule
        if schedule.needs_token_ids:
            expected = _recomputed(
                expected,
                fresh(self._model, expected.token_ids),
                schedule.recomputed_layers,
                schedule.recomputed_tokens,
            )
        kinds = [{part.method.kind for part in parts} for parts in schedule.parts]
        bounds = [
            max((LOSSY_BOUNDS.get(kind, EXACT_BOUND) for kind in of), default=EXACT_BOUND) for of in kinds
        ]
        errors = expected.errors(found)
        assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (errors, bounds)

    def _check_computed(self, count: int, prompt: list[int], reply: list[int], found: Cache) -> None:
        """The same pass on what was restored: nothing was read before it was there, or written behind it."""
        own = Kept.of_cache([*prompt, *reply], found)
        again = Kept([0] * count, own.first(count).layers).cache(self._model)
        logits = prefill(self._model, again, prompt)
        for token in reply:
            assert logits[token] >= logits.max() - 1e-3
            logits = prefill(self._model, again, [token])
        all_ids = [0] * (count + len(prompt) + len(reply))
        assert max(Kept.of_cache(all_ids, again).errors(found)) <= EXACT_BOUND


def _recomputed(expected: Kept, computed: Kept, layer_count: int, token_count: int) -> Kept:
    """The first layers from a prefill, and the first tokens of the layer behind them."""
    layers = []
    for layer, (mine, theirs) in enumerate(zip(expected.layers, computed.layers, strict=True)):
        cut = len(expected.token_ids) if layer < layer_count else token_count if layer == layer_count else 0
        layers.append(
            tuple(torch.cat([b[:, :, :cut], a[:, :, cut:]], dim=2) for a, b in zip(mine, theirs, strict=True))
        )
    return Kept(expected.token_ids, layers)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(WALKS))
def test_each_turn_begins_on_the_cache_that_its_session_had(server: ServerProcess, seed: int) -> None:
    """All methods and their mixes, forks, truncations, other histories, and rows from SSD, near and far."""
    with (
        ctxcache.connect(server.target, access="local") as near,
        ctxcache.connect(server.target, access="remote") as far,
    ):
        walk = _Walk(seed, [near, far])
        try:
            for _ in range(STEPS):
                walk.step()
        except Exception as error:
            error.add_note("\n".join(walk.story))
            raise
    assert walk.reused_count

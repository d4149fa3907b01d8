#!/usr/bin/env python3
"""Aging, live: one session after the other given smaller forms while it is idle, and used again in each.

    python -m lab.studies.aging                             # SmolLM2, this machine as it was measured
    python -m lab.studies.aging --model DIRECTORY --text FILE --tokens 512

A store, an engine with a planner, and a session of a text, saved as the planner says. The clock that the
sweep is told goes on a little more each time; whenever it changes the session's form, the form's bytes are
printed, what the planner said that bringing it back takes and what it took, and by how much predictions from
it diverge from those of the cache that was never dropped. A kind's bound is what `ctxcache worker layout`
knows it by; exact forms may differ by rounding alone. The control brings a session back from the rows of
the token before each, and must be seen. Exits with 1 where a reply is beyond its bound.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from ctxcache.client import CallerModel, Client
from ctxcache.client.types import SessionInfo
from ctxcache.format.packing import LOSSY_KINDS, loss_nats
from ctxcache.format.streams import TOKENS
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.families import Adapter
from gpu_worker.families.generation import continue_greedy, prefill
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.sources import LeasedSource
from gpu_worker.planning.layout import Kinds
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.planning.profile import Profile
from gpu_worker.profiling.measure import measure
from gpu_worker.saving.aging import RENT_S_PER_GB_HOUR, kinds_text
from lab.demo.embedded_store import embedded_store
from lab.demo.machine import physical_core_count, this_machine
from lab.demo.models import load_model, smollm2
from lab.demo.text import passages
from lab.quality.divergence import compare, logits_of
from lab.quality.restoring import pipeline_for, restored_cache

EXACT_NATS = 1e-6
"""The most by which rounding alone may move a prediction."""
SEEN_NATS = 1e-3
"""The least that the control has to move it."""
HOURS = tuple(2.0**power for power in range(-4, 24))
ROUNDS, REPLY = 3, 16
NAME = "aging-live"
SESSION = f"sessions/{NAME}"


def main(
    *,
    model: Annotated[Path | None, typer.Option(help="A transformers directory; SmolLM2-135M.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text; the Python language reference.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the session.", min=64)] = 512,
    predicted: Annotated[int, typer.Option(help="Tokens that are predicted behind it.", min=16)] = 64,
    rent: Annotated[
        float, typer.Option(help="Seconds of this machine for a GB kept for an hour.", min=0)
    ] = RENT_S_PER_GB_HOUR,
    loss: Annotated[bool, typer.Option("--loss/--exact", help="Whether packed kinds may be used.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Measure, print, judge."""
    torch.set_num_threads(physical_core_count())
    loaded, tokenizer = load_model(model or smollm2())
    words = text.read_text() if text else "\n\n".join(p for one in passages() for p in one.paragraphs)
    ids = list(tokenizer.encode(words[: 20 * (tokens + predicted)], add_special_tokens=False))
    if len(ids) < tokens + predicted:
        sys.exit(f"the text has {len(ids)} tokens, and {tokens + predicted} are needed")
    adapter = adapt(loaded)
    lengths = (64, max(tokens // 4, 65), tokens)
    profile = measure(adapter, name="live", hardware=this_machine().title, lengths=lengths).profile
    rows = live(loaded, profile, ids[:tokens], ids[tokens : tokens + predicted], rent=rent, is_lossy=loss)
    is_right = True
    for row in rows:
        is_right = is_right and bool(row["is_right"])
        print(json.dumps(row) if as_json else _shown(row), flush=True)
    sys.exit(0 if is_right else 1)


def live(
    model: PreTrainedModel, profile: Profile, ids: list[int], new: list[int], *, rent: float, is_lossy: bool
) -> list[dict[str, Any]]:
    """A line for the form that the session begins with, for each that it comes to have, and the control."""
    adapter = adapt(model)
    spec = model_spec(
        model, model_id="aging", weights_digest="aging", packed_kinds=LOSSY_KINDS if is_lossy else ()
    )
    found: list[dict[str, Any]] = []
    with embedded_store(2 << 30) as running:
        client = running.client
        with TransformersEngine(model, client, spec, profile=profile) as engine:
            engine.turn(NAME, ids, max_new_tokens=0)
            engine.wait(NAME)
            aging = engine.aging(rent_s_per_gb_hour=rent, thaw_s=0.0)
            looking = _Looking(adapter, client, engine, ids, new)
            begin = client.sessions.get(SESSION)
            found.append(looking.look(0.0, begin))
            for hours in HOURS:
                now_s = (begin.access_time_ns or 0) / 1e9 + 3600 * hours
                swept = [one for one in aging.sweep(now_s=now_s) if one.session_name == SESSION]
                if swept and swept[0].reason:
                    sys.exit(f"not as it must be: the session was left alone, {swept[0].reason}")
                if swept:
                    found.append(looking.look(hours, client.sessions.get(SESSION)))
        found.append(looking.control())
    return found


class _Looking:
    """Brings the session back, and says what that took and what it is worth."""

    def __init__(
        self, adapter: Adapter, client: Client, engine: TransformersEngine, ids: list[int], new: list[int]
    ) -> None:
        self._adapter, self._client, self._engine = adapter, client, engine
        self._ids, self._new = ids, new
        self._standard = self._logits(self._computed(ids))
        self._reply = self._continued(self._computed(ids))
        self._fork_count = 0

    def look(self, hours: float, session: SessionInfo) -> dict[str, Any]:
        """The session as it is now. Turns are its forks': it stays as idle as it is."""
        kinds = _kinds(session, len(self._adapter.layers))
        cost, turns = self._engine.cost(NAME), []
        for _ in range(ROUNDS):
            self._fork_count += 1
            fork = self._client.sessions.open(session.name).fork(id=f"{NAME}-{self._fork_count}")
            name = fork.name.removeprefix("sessions/")
            turns.append(self._engine.turn(name, self._new[:1], max_new_tokens=REPLY, eos_token_ids=()))
            self._engine.wait(name)
            self._client.sessions.open(fork.name).delete()
        one = compare(self._logits(self._stored(session, kinds)), self._standard, self._new, 0.0)
        nats, bound = abs(one.kl_nats), loss_nats(kind for kind in kinds if kind is not None)
        replies = [turn.token_ids for turn in turns]
        is_hit = all(turn.reused_token_count == len(self._ids) and not turn.miss_reason for turn in turns)
        is_same = all(reply == self._reply for reply in replies)
        return {
            "idle_h": hours,
            "form": kinds_text(kinds),
            "ssd_bytes_a_token": round(session.ssd_bytes / session.token_count),
            "predicted_ms": round(cost.restored_s * 1e3, 1),
            "restored_ms": round(median(turn.restored_ns for turn in turns) / 1e6, 1),
            "recompute_ms": round(cost.others_s["recompute"] * 1e3, 1),
            "kl_nats": float(f"{nats:.2g}"),
            "bound_nats": bound or EXACT_NATS,
            "same_reply": is_same,
            "is_right": is_hit and nats <= (bound or EXACT_NATS) and (is_same or bound > 0),
        }

    def control(self) -> dict[str, Any]:
        """A pass over the tokens in another order, passed off as the session's."""
        one = compare(self._logits(self._computed(self._ids[::-1])), self._standard, self._new, 0.0)
        return {"form": "control", "kl_nats": one.kl_nats, "is_right": one.kl_nats > SEEN_NATS}

    def _computed(self, ids: list[int]) -> Cache:
        cache = DynamicCache(config=self._adapter.model.config)
        prefill(self._adapter.model, cache, ids)
        return cache

    def _stored(self, session: SessionInfo, kinds: Kinds) -> Cache:
        plan = RestorePlan(tuple(Method.TOKENS if kind is None else Method[kind.name] for kind in kinds))
        own = stored_model(self._client, session)
        with (
            self._client.sessions.open(session, own).read(streams={TOKENS, *plan.streams()}) as rows,
            pipeline_for(self._adapter) as pipeline,
        ):
            ids = torch.tensor(rows.token_ids())
            return restored_cache(
                pipeline,
                self._adapter,
                plan,
                LeasedSource(rows),
                positions=torch.arange(len(ids)),
                token_ids=ids,
            )

    def _logits(self, cache: Cache) -> Tensor:
        return logits_of(self._adapter, cache, self._new)

    def _continued(self, cache: Cache) -> list[int]:
        return continue_greedy(
            self._adapter.model, cache, self._new[:1], max_new_tokens=REPLY, eos_token_ids=()
        ).token_ids


def stored_model(client: Client, session: SessionInfo) -> CallerModel:
    """The session's model as the store describes it."""
    return CallerModel(client.models.get(session.model).spec)


def _kinds(session: SessionInfo, layer_count: int) -> Kinds:
    held = {stream.layer: stream.kind for stream in session.streams() if stream != TOKENS}
    return tuple(held.get(layer) for layer in range(layer_count))


def _shown(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in row.items())


if __name__ == "__main__":
    typer.run(main)

"""A conversation and its edit, and a pass ahead in a process that kills itself at one of its calls."""

import os
import random
import signal
import sys
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import build
from transformers import PreTrainedModel

import ctxcache
from ctxcache.client import Client
from ctxcache.client.wire import Wire
from ctxcache.format.model import ModelSpec
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan
from tests.nursery import Entry

REPLY_TOKENS = 8
STEP_TOKENS = 16
FIRST = random.Random(1).choices(range(3, 60), k=300)
EDITED = [*FIRST[:150], *FIRST[190:]]
"""Forty tokens of thought were stripped."""
NEXT = [9, 41, 3]


@cache
def model() -> PreTrainedModel:
    """The engine's."""
    torch.set_num_threads(1)
    return build("llama")


@cache
def reference() -> PreTrainedModel:
    """The same, of which no engine knows: replies are compared with its own, beside what an engine runs."""
    return build("llama")


@cache
def spec() -> ModelSpec:
    """Its description."""
    return model_spec(model(), model_id="edited")


def engine_on(client: Client, method: Method = Method.KV, **settings: Any) -> TransformersEngine:
    """An engine that saves and restores so."""
    plan = RestorePlan.uniform(method, spec().layer_count)
    return TransformersEngine(model(), client, spec(), plan, **settings)


def run() -> None:
    """`TARGET SESSION NUMBER`: do the pass, and die before the client's call of that number."""
    target, session_id, number = sys.argv[-3:]
    calls, call, patch = [0], Wire.call, pytest.MonkeyPatch()

    def counting(wire: Wire, method: Any, request: Any) -> Any:
        calls[0] += 1
        if calls[0] == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(wire, method, request)

    # Over the network, so that adoptions are calls, too.
    with ctxcache.connect(target, access="remote", transport="grpc") as client, engine_on(client) as engine:
        patch.setattr(Wire, "call", counting)
        done = engine.rerendered(session_id, EDITED, step_tokens=STEP_TOKENS)
        patch.undo()
        sys.exit(0 if done.is_in_place else 1)


CHILD = Entry("killed_passes:run", ("pass",))

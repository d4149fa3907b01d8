"""Restore plans: reading them, what they need, what they refuse."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxcache.errors import InvalidArgument
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from gpu_worker.planning.plan import Method, RestorePlan
from tests.model_specs import small_model


def _spec(layer_count: int = 2) -> ModelSpec:
    streams = tuple(
        StreamSpec(Stream(layer, kind), size, DType.FLOAT16)
        for layer in range(layer_count)
        for kind, size in ((StateKind.HIDDEN, 100), (StateKind.KV, 60))
    )
    return small_model(
        *streams, model_id="m", architecture="A", layer_count=layer_count, hidden_size=50, head_size=15
    )


def test_mixed_plan_reads_its_compact_form() -> None:
    """`hidden:0-1,kv:2` names three layers, both ends counted."""
    plan = RestorePlan.parse("hidden:0-1,kv:2")

    assert plan.methods == (Method.HIDDEN, Method.HIDDEN, Method.KV)


ALONE = [method for method in Method if method is not Method.TOKENS and not method.is_delta]
"""Methods of a layer that do not depend on the layer below."""


@given(st.lists(st.sampled_from(ALONE), min_size=1), st.integers(0, 5))
def test_compact_form_round_trips(methods: list[Method], recomputed_count: int) -> None:
    """Every plan is what its own text reads back as."""
    plan = RestorePlan((Method.TOKENS,) * recomputed_count + tuple(methods))

    assert RestorePlan.parse(str(plan)) == plan
    assert plan.recomputed_layer_count == recomputed_count


def test_deltas_round_trip_above_a_base() -> None:
    """A chain is written like any other run of layers."""
    text = "hidden_int8:0,hidden_delta_int4:1-3,kv:4"
    assert str(RestorePlan.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not method:layer"),
        ("hidden", "is not method:layer"),
        ("hidden:0,frozen:1", "'frozen' is not one of hidden, kv, latent, kv_as_cached, tokens"),
        ("hidden:0-1,kv:3", "must start at layer 2"),
        ("hidden:0-1,kv:1-2", "must start at layer 2"),
        ("hidden:0,kv:1-0", "must start at layer 1|ends before it starts"),
        ("kv:0,tokens:1", "a recomputed layer follows one that is not"),
    ],
)
def test_wrong_plans_say_what_is_wrong(text: str, problem: str) -> None:
    """A plan that cannot be read names its part and the reason."""
    with pytest.raises(InvalidArgument, match=problem) as caught:
        RestorePlan.parse(text)

    assert caught.value.field == "plan"


def test_plan_without_layers_is_refused() -> None:
    """A plan covers at least one layer."""
    with pytest.raises(InvalidArgument, match="no layers"):
        RestorePlan.uniform(Method.KV, 0)


def test_recomputed_layers_need_only_token_ids() -> None:
    """A plan reads token ids once and one stream for each layer that is not recomputed."""
    plan = RestorePlan.parse("tokens:0,hidden:1")

    assert plan.streams() == (TOKENS, Stream(1, StateKind.HIDDEN))


def test_bytes_per_token_count_token_ids_and_rows() -> None:
    """A token costs the rows of the plan's streams and four bytes of token id."""
    assert RestorePlan.parse("hidden:0,kv:1").bytes_per_token(_spec()) == 4 + 100 + 60
    assert RestorePlan.uniform(Method.TOKENS, 2).bytes_per_token(_spec()) == 4


@pytest.mark.parametrize(
    ("plan", "problem"),
    [("kv:0", "1 layers, the model has 2"), ("kv:0,latent:1", "no stream layer 1 latent")],
)
def test_plan_for_another_model_is_refused(plan: str, problem: str) -> None:
    """A plan is checked against the model's layers and streams before anything is read."""
    with pytest.raises(InvalidArgument, match=problem):
        RestorePlan.parse(plan).check(_spec())


def test_plan_imports_no_torch() -> None:
    """The planner runs where torch is not installed."""
    code = "import sys, gpu_worker.planning.plan; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Forms on a trace: by hand where one can, and the mixed strategy within twice of one that knows."""

from dataclasses import replace

import pytest
from playing import turn

from ctxcache.errors import InvalidArgument
from ctxcache.simulate.load import GB, HOUR_S, Load, Prices
from lab.placement.forms import Keeper, Rest, forms_of, keep

HOUR = HOUR_S
LOAD = Load(
    token_bytes=1000,
    prefill_tokens_per_s=100.0,
    ttl_s=100 * HOUR,
    prices=Prices(gpu_hour=36.0, ssd_gb_hour=1.0),
)
"""A token's prefill is 0.0001 $, its K/V for an hour 0.000001 $: 100 hours of it."""
FORMS = forms_of("kv=1:0,small=0.25:0.1,tokens=0:1", LOAD.token_bytes)


def test_pure_forms_are_counted_by_hand() -> None:
    """100 tokens are idle for 10 hours, and then for 100 until they expire."""
    kept, span_s = keep([turn("a", 0.0), turn("a", 10 * HOUR)], LOAD, FORMS)
    by_name = {one.strategy: one.to_dict(LOAD, span_s) for one in kept}

    assert span_s == 110 * HOUR
    assert by_name["kv"]["gpu_s"] == 0.0
    assert by_name["tokens"]["gpu_s"] == 1.0
    assert by_name["small"]["gpu_s"] == pytest.approx(0.1)
    for name, token_bytes in (("kv", 1004), ("small", 254), ("tokens", 4)):
        expected = token_bytes * (100 * 10 + 200 * 100) / GB
        assert by_name[name]["gb_hours"] == pytest.approx(expected)
        assert by_name[name]["returns"] == 1


def test_the_mixed_strategy_changes_when_the_cheapest_would_be_another() -> None:
    """K/V against a quarter: 0.1 of a prefill is 13.3 hours of the bytes saved; token ids pay never here."""
    keeper = Keeper(FORMS, LOAD)
    change_s = 0.1 * 0.0001 / (750 * 1e-9) * HOUR
    assert keeper.mixed(0, change_s * 0.99, returns=True).after == 0
    late = keeper.mixed(0, change_s * 1.01, returns=True)
    assert (late.after, late.changes) == (1, 1)
    assert late.byte_s == pytest.approx(1004 * change_s + 254 * change_s * 0.01)
    # A form that it goes back to a prefill for: coming back from token ids costs two.
    days = keeper.mixed(0, 2e4 * HOUR, returns=True)
    assert days.after == 0
    assert [round(rest.gpu_share, 9) for rest in (late, days)] == [0.1, 2.0]


def test_a_competitive_bound_holds_for_every_rest() -> None:
    """Whatever the time idle: at most twice the best form for it, where making one is free."""
    forms = forms_of("kv=1:0,small=0.25:0.1,less=0.1:0.4", LOAD.token_bytes)
    keeper = Keeper(forms, LOAD)
    rent, gpu = 1.0 / GB / HOUR, 0.0001

    def cost(rest: Rest) -> float:
        return gpu * rest.gpu_share + rent * rest.byte_s

    worst = 0.0
    for tenth in range(1, 20_000):
        idle_s = tenth * HOUR / 10
        worst = max(
            worst, cost(keeper.mixed(0, idle_s, returns=True)) / cost(keeper.knows(idle_s, returns=True))
        )
    pure = max(
        cost(keeper.pure(0, t * HOUR, returns=True)) / cost(keeper.knows(t * HOUR, returns=True))
        for t in (1, 10, 2000)
    )
    assert 1.0 < worst <= 2.0 + 1e-9
    assert pure > 2.0


def test_what_never_returns_is_soon_not_worth_its_rent() -> None:
    """One of 50 sessions returns: learning that is cheaper than the bound's way, and than keeping K/V."""
    turns = [turn(str(number), float(number)) for number in range(50)] + [turn("3", HOUR)]
    kept, span_s = keep(turns, LOAD, FORMS)
    costs = {one.strategy: one.to_dict(LOAD, span_s)["cost"] for one in kept}
    mixed, learned, pure = (float(str(costs[name])) for name in ("mixed", "learned", "kv"))
    assert learned < 0.5 * mixed < mixed < pure


def test_what_expired_is_computed_by_every_form() -> None:
    """And its rent ends with its life."""
    kept, _ = keep([turn("a", 0.0), turn("a", 1000 * HOUR)], LOAD, FORMS)
    assert {one.strategy: one.gpu_s for one in kept}["kv"] == 1.0
    assert all(one.gpu_s >= 1.0 for one in kept)
    assert kept[0].byte_s == pytest.approx(1004 * 100 * HOUR * (100 + 200))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kv", "is not NAME=BYTES"),
        ("kv=1", "is not NAME=BYTES"),
        ("kv=1:0:0:0,tokens=0:1", "is not NAME=BYTES"),
        ("kv=1:-1,tokens=0:1", "none of them negative"),
        ("kv=1:nan,tokens=0:1", "none of them negative"),
        ("kv=1:0", "1 forms"),
        ("kv=1:0,kv=0:1", "'kv' is there already"),
        ("kv=1:0,mixed=0:1", "'mixed' is there already"),
        ("kv=1:0,learned=0:1", "'learned' is there already"),
        ("kv=1:0,more=2:0", "none is larger"),
    ],
)
def test_forms_that_cannot_be_read_are_refused(text: str, problem: str) -> None:
    """With what is wrong."""
    with pytest.raises(InvalidArgument, match=problem) as raised:
        forms_of(text, 1000)
    assert raised.value.field == "forms"


def test_a_price_of_nothing_weighs_nothing() -> None:
    """It is refused, not divided by."""
    free = replace(LOAD, prices=Prices(ssd_gb_hour=0.0))
    with pytest.raises(InvalidArgument, match="a price is 0"):
        keep([], free, FORMS)


def test_a_trace_without_turns_has_no_figures() -> None:
    """Nothing is divided by its time."""
    kept, span_s = keep([], LOAD, FORMS)
    assert span_s == 0.0
    assert all(one.to_dict(LOAD, span_s)["cost"] == 0.0 for one in kept)

"""`ctxcache size` as a user meets it."""

import json
from pathlib import Path

import pytest
from command_line import ctxcache

from ctxcache.cli.failures import ExitCode
from ctxcache.simulate import sizing
from ctxcache.simulate.crowd import Crowd
from ctxcache.simulate.load import Load
from ctxcache.simulate.sizing import sizes_of

FEW = ("--users", "150", "--model", "llama-3-8b", "--conversations", "1", "--turns", "4")


def test_a_sentence_a_table_and_the_best(tmp_path: Path) -> None:
    """Every line fits 80 columns; the marked size is the one of the sentence."""
    ran = ctxcache("size", *FEW)

    assert ran.exit_code == ExitCode.OK
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("150 users a day")
    assert "131,072 bytes a token (kv)" in lines[1]
    (best,) = [line for line in lines if line.startswith("*")]
    assert f"Best: {' '.join(best.split()[1:3])} of DRAM" in ran.stdout
    assert max(map(len, lines)) <= 100


def test_facts_for_scripts() -> None:
    """More room finds more; what is left is what is saved less what it costs."""
    facts = json.loads(ctxcache("size", *FEW, "-o", "json").stdout)
    sizes = facts["sizes"]
    rates = [sized["prompt_hit_rate"] for sized in sizes]
    assert rates == sorted(rates)
    assert 0 < rates[0] < rates[-1] < 1
    for sized in sizes:
        assert sized["net_saved"] == pytest.approx(sized["gpu_saved"] - sized["storage_cost"])
    assert facts["all_bytes_of_a_ttl"] == 150 * 8000 * 131_072
    assert max(sized["net_saved"] for sized in sizes) == sizes[facts["best"]]["net_saved"]


def test_many_users_are_scaled_from_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of ten times as many are ten times as large: drawn whole, and from a tenth of them."""
    monkeypatch.setattr(sizing, "SAMPLE_CONVERSATIONS", 300)
    load = Load(is_inclusive=True, segment_tokens=64, is_timed=True, is_closed=True)
    some, many = (
        list(sizes_of(Crowd(users, 1, 8000, 4, 300, 8 * 3600), load, "value", step=lambda *_: None))[-1]
        for users in (300, 3000)
    )
    assert many.ssd_bytes / some.ssd_bytes == pytest.approx(10, rel=0.01)
    assert many.gpu_hours_saved_per_day / some.gpu_hours_saved_per_day == pytest.approx(10, rel=0.01)
    assert many.prompt_hit_rate == pytest.approx(some.prompt_hit_rate, abs=0.01)
    assert 0 < some.prompt_hit_rate < 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "gpt-9"), "gpt-9"),
        (("--users", "0"), "--users"),
        (("--state", "mla"), "--state"),
        (("--think", "often"), "--think"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: tuple[str, ...], words: str) -> None:
    """The option or the name is in the sentence."""
    ran = ctxcache("size", *FEW, *options)

    assert ran.exit_code != ExitCode.OK
    assert words in ran.stderr

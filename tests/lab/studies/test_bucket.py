"""The study of a bucket behind several hosts: where history comes from, and that price admits what pays."""

import json
import random
from pathlib import Path

import pytest

from ctxcache.core.placement.prices import Bucket, BucketPrices, Recomputation
from ctxcache.simulate.rows import TraceTurn
from lab.studies import bucket as study
from lab.studies.bucket import WAYS, Spent, play, routed

GQA = Recomputation(prefill_tokens_per_s=5280, token_bytes=327_680, gpu_count=4)
MHA = Recomputation(prefill_tokens_per_s=14_200, token_bytes=819_200, gpu_count=2)
PRICES = BucketPrices(bytes_per_s=2e9)


def chats() -> list[TraceTurn]:
    """Three of four sessions come once; the others have eight turns, two minutes apart."""
    draw = random.Random(3)
    found = []
    for number in range(800):
        begin_s = draw.uniform(0, 7200)
        times_s = [begin_s + 120 * turn for turn in range(1 if number % 4 else 8)]
        found += [TraceTurn(b"%d" % number, at_s, 3000, 300, None, None) for at_s in times_s]
    return sorted(found, key=lambda turn: turn.arrival_s)


def spent(way: str, recomputation: Recomputation, affinity: float, *, hosts: int = 4) -> Spent:
    """Of hosts that have room for a few sessions."""
    token_bytes = int(recomputation.token_bytes)
    return play(
        chats(), way, Bucket(PRICES, recomputation), 60 * 3300 * token_bytes,
        hosts=hosts, affinity=affinity, ttl_s=7200.0,
    )  # fmt: skip


@pytest.mark.parametrize("affinity", [0.5, 0.9])
@pytest.mark.parametrize("recomputation", [GQA, MHA], ids=["gqa", "mha"])
def test_admission_by_price_costs_no_more_than_all_or_nothing(
    recomputation: Recomputation, affinity: float
) -> None:
    """By 2 % at most: state that is computed faster than it comes is put nowhere, other where it pays."""
    none, everything, price = (spent(way, recomputation, affinity) for way in WAYS)

    assert price.total <= 1.02 * min(none.total, everything.total)
    assert (price.put_count == 0) is (recomputation is MHA)
    assert price.put_count <= everything.put_count
    for one in (none, everything, price):
        assert one.local_tokens + one.bucket_tokens + one.computed_tokens == one.history_tokens > 0
    assert none.bucket_tokens == none.put_count == 0


def test_turns_that_stray_find_in_the_bucket_what_another_host_has() -> None:
    """Less affinity finds less on the host, and as much altogether."""
    near, far = spent("all", GQA, 1.0), spent("all", GQA, 0.3)

    assert far.local_tokens < near.local_tokens
    assert far.bucket_tokens > near.bucket_tokens
    assert far.computed_tokens < 0.02 * far.history_tokens
    shares = [
        routed(b"%d" % number, 1, 4, 0.7) == routed(b"%d" % number, 1, 4, 1.0) for number in range(2000)
    ]
    assert sum(shares) / 2000 == pytest.approx(0.7, abs=0.05)


def test_the_study_prints_a_table_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each way."""
    trace, results = tmp_path / "chats.csv", tmp_path / "found.jsonl"
    rows = [f"{name},{turn * 60_000},{2000},{200}" for turn in range(3) for name in "ab"]
    trace.write_text("\n".join(["session_id,arrival_ms,new_input_tokens,output_tokens", *rows]) + "\n")
    monkeypatch.setattr("sys.argv", ["bucket", str(trace), "--results", str(results)])
    study.main()

    said = capsys.readouterr().out
    assert [line.split(" ")[1] for line in said.splitlines()[2:]] == list(WAYS)
    assert [json.loads(line)["way"] for line in results.read_text().splitlines()] == list(WAYS)

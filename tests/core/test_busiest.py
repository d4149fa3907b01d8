"""Busiest: who is accessed most is known whatever else comes and goes."""

from ctxcache.core.observations import Busiest


def test_the_busiest_come_first_and_are_found_in_a_crowd() -> None:
    """With far more sessions than are counted, none of whom comes twice."""
    busiest = Busiest(limit=64)
    for i in range(10_000):
        busiest.count(i.to_bytes(4, "big"))
        if i % 10 == 0:
            busiest.count(b"often")
        if i % 20 == 0:
            busiest.count(b"less often")

    assert [uid for uid, _ in busiest.first(2)] == [b"often", b"less often"]
    assert len(busiest.first(10_000)) <= 64


def test_one_that_is_gone_is_not_named() -> None:
    """Nor is forgetting what was never counted a failure."""
    busiest = Busiest()
    busiest.count(b"a")
    busiest.forget(b"a")
    busiest.forget(b"b")

    assert busiest.first(1) == []

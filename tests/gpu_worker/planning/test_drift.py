"""The drift detector: reports what lasts, once; leaves noise alone."""

import random

import pytest

from ctxcache.errors import InvalidArgument
from gpu_worker.planning.adaptive import Drift, DriftBounds, DriftDetector
from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.plan import Stage
from gpu_worker.planning.profile import StatePlace


def _watch(
    detector: DriftDetector, ratios: list[float], stage: Stage = Stage.COPY
) -> list[tuple[int, Drift]]:
    """The reports, each with the number of the observation that caused it."""
    seen = (detector.observe(stage, predicted_s=2.0, observed_s=2.0 * ratio) for ratio in ratios)
    return [(i, drift) for i, drift in enumerate(seen, 1) if drift is not None]


def test_a_lasting_change_is_reported_once_with_its_factor() -> None:
    """A stage that takes 1.5 times as long is off at the eighth observation, and not again."""
    reports = _watch(DriftDetector(), [1.5] * 500)

    assert [(count, drift.stage) for count, drift in reports] == [(8, Stage.COPY)]
    assert reports[0][1].factor == pytest.approx(1.5)


def test_a_faster_stage_is_off_as_well() -> None:
    """Predictions that are too long make worse plans, too."""
    reports = _watch(DriftDetector(), [0.5] * 20)

    assert reports[0][1].factor == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_reported(seed: int) -> None:
    """Times that are off by up to 30 % either way, right on average, ask for no new plan."""
    generator = random.Random(seed)

    assert _watch(DriftDetector(), [generator.uniform(0.7, 1.3) for _ in range(20_000)]) == []


def test_a_stall_is_not_a_trend() -> None:
    """Single observations of 100 times the prediction are passed over, however often they come alone."""
    assert _watch(DriftDetector(), ([100.0] + [1.0] * 30) * 50) == []


@pytest.mark.parametrize("seed", range(5))
def test_noise_around_the_border_reports_once(seed: int) -> None:
    """Hysteresis: a stage that hovers about a quarter off is reported at most once."""
    generator = random.Random(seed)
    reports = _watch(DriftDetector(), [generator.uniform(1.15, 1.37) for _ in range(20_000)])

    assert len(reports) <= 1


def test_a_stage_that_came_back_may_be_reported_again() -> None:
    """After it was near 1, a second change counts as new."""
    reports = _watch(DriftDetector(), [1.6] * 20 + [1.0] * 40 + [1.6] * 40)

    assert len(reports) == 2


def test_corrected_predictions_end_the_drift() -> None:
    """With the reported factor in the profile, and the stage rebased, there is nothing left to report."""
    profile, detector = known_profile("a100-40gb"), DriftDetector()
    size_bytes = {StatePlace.DRAM: 1e9}
    truth_s = 1.7 * profile.transfer_s(size_bytes)[1]
    reports = 0
    for _ in range(200):
        drift = detector.observe(
            Stage.COPY, predicted_s=profile.transfer_s(size_bytes)[1], observed_s=truth_s
        )
        if drift is not None:
            reports += 1
            profile = profile.corrected({drift.stage: drift.factor})
            detector.rebase(drift.stage)

    assert reports == 1
    assert profile.transfer_s(size_bytes)[1] == pytest.approx(truth_s)


def test_stages_are_watched_each_for_itself() -> None:
    """A slow copy says nothing of projections."""
    detector = DriftDetector()
    for _ in range(20):
        detector.observe(Stage.COPY, predicted_s=1.0, observed_s=3.0)
        assert detector.observe(Stage.PROJECT, predicted_s=1.0, observed_s=1.0) is None

    assert detector.factors == {Stage.COPY: pytest.approx(3.0), Stage.PROJECT: pytest.approx(1.0)}


@pytest.mark.parametrize(
    "times", [(0.0, 1.0), (1.0, 0.0), (1.0, float("nan")), (float("inf"), 1.0), (1.0, -2.0)]
)
def test_times_that_say_nothing_are_passed_over(times: tuple[float, float]) -> None:
    """Nothing was to be done, or a clock went back: no ratio comes of it."""
    detector = DriftDetector()
    for _ in range(20):
        assert detector.observe(Stage.READ, predicted_s=times[0], observed_s=times[1]) is None

    assert detector.factors == {}


def test_bounds_must_leave_room_for_hysteresis() -> None:
    """A stage must come back further than it had to go away."""
    with pytest.raises(InvalidArgument):
        DriftBounds(enter=1.1, leave=1.2)

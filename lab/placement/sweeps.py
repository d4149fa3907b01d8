"""Sweeps: replays that differ in one thing or two, each with its place in a picture. Knows no terminal.

The sweeps by name are Figures 13 and 21 to 25 of CachedAttention (USENIX ATC'24, section 4), and two that
size a machine for any trace. Each varies what its figure varies and leaves the rest of the load as it was
told.

The paper's settings and results stand beside ours. Its hit rates seem to be of all turns after the warm-up,
first ones too: every model ends just short of the share of later turns. Where its text gives only a
difference, the sum stands here.

Runs are played here or in other processes. Each process reads the trace itself, and rows come in the order of
the runs. Worst case: one process is killed, which is ReplayLost, and the others end.
"""

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace

from ctxcache.errors import CacheError
from ctxcache.simulate.load import GIB, MODELS, Load, Overflow
from ctxcache.simulate.study import Capacity, Step, StudyOutcome, footprint_bytes, look, study
from lab.placement.census import Census, PacedTrace, count
from lab.placement.policies import NAMES, policy_of


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One replay: its group along the axis, its series, what it is told, and what the paper reached there."""

    x: str | float
    series: str
    policy: str
    load: Load
    sessions_times: float = 1.0
    paper: Mapping[str, float] = field(default_factory=dict)
    """Figures by the names that ours have; shares, not per cent."""

    def scaled(self, factor: float) -> "SweepRun":
        """The run with so many times the capacity.

        DRAM stays, as turns and prefetches need what they need.
        """
        load = self.load
        total_bytes = int((load.dram_bytes + load.ssd_bytes) * factor)
        dram_bytes = min(load.dram_bytes, total_bytes)
        return replace(self, load=replace(load, dram_bytes=dram_bytes, ssd_bytes=total_bytes - dram_bytes))


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of the picture: a figure by its name in the rows, with its title and unit."""

    figure: str
    title: str
    is_share: bool = True
    unit: float = 1.0
    """The figure's divisor: 3600 makes hours of seconds."""
    parts: tuple[tuple[str, str], ...] = ()
    """Figures that add up to it, with what each is, bottom first."""
    ceiling: str = ""
    """The figure that it cannot exceed, whatever the store."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """`make` gives the runs for a load, policies and what the trace holds; `preset` is the paper's load."""

    name: str
    title: str
    source: str
    x_title: str
    panels: tuple[Panel, ...]
    policies: tuple[str, ...]
    preset: Load
    make: Callable[[Load, Sequence[str], Census], list[SweepRun]]
    is_lines: bool = False
    is_sized: bool = True
    """Its capacities are bytes, which may be scaled as if the live footprint were another."""
    is_of_footprint: bool = False
    """Its capacities are multiples of the live footprint."""
    has_one_policy: bool = False
    """Its series are no policies."""
    decides: tuple[str, ...] = ()
    """Options of the command that would say what its runs differ in."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A run and the figures it came to."""

    run: SweepRun
    figures: Mapping[str, object]

    def number(self, name: str) -> float:
        """One of the figures."""
        value = self.figures[name]
        if not isinstance(value, (int, float)):
            raise TypeError(name)
        return float(value)

    def to_dict(self, sweep: Sweep, census: Census) -> dict[str, object]:
        """For JSON: what the picture shows, what the trace holds, then all figures."""
        run = self.run
        return {
            "sweep": sweep.name,
            "source": sweep.source,
            "x": run.x,
            "series": run.series,
            "paper": dict(run.paper),
            "census": asdict(census),
            "token_bytes": run.load.token_bytes,
            **self.figures,
        }


TB = 10**12
SMALL_SSD_BYTES, LARGE_SSD_BYTES = 2 * TB, 10 * TB
HBM_BYTES = 10 * 10**9
WARM_UP_TURNS = 10_000

LOAD = MODELS["llama-13b"].served(
    Load(
        dram_bytes=128 * GIB,
        ssd_bytes=LARGE_SSD_BYTES,
        slot_count=24,
        decode_tokens_per_s=50.0,
        warm_up_count=WARM_UP_TURNS,
    )
)
"""24 turns at once, as its batch of 24.

50 tokens a second each make the 42K turns last the hours of its Figure 25d.
"""

POLICIES: dict[tuple[int, str], dict[str, float]] = {
    (SMALL_SSD_BYTES, "lru"): {"all_hit_rate": 0.129, "all_dram_hit_rate": 0.005},
    (SMALL_SSD_BYTES, "fifo"): {"all_hit_rate": 0.095, "all_dram_hit_rate": 0.005},
    (SMALL_SSD_BYTES, "look-ahead"): {"all_hit_rate": 0.40},
    (LARGE_SSD_BYTES, "lru"): {"all_hit_rate": 0.58, "all_dram_hit_rate": 0.006},
    (LARGE_SSD_BYTES, "fifo"): {"all_hit_rate": 0.48, "all_dram_hit_rate": 0.005},
    (LARGE_SSD_BYTES, "look-ahead"): {"all_hit_rate": 0.86, "all_dram_hit_rate": 0.8566},
}
"""Figure 21. Its look-ahead is 27 points above LRU and 31 above FIFO at 2 TB."""

MODEL_HITS = {"llama-13b": 0.86, "llama-65b": 0.71, "llama-70b": 0.89, "falcon-40b": 0.90}
"""Figure 13: 128 GB and 10 TB."""
LOST_BY_INVALIDATION = {"llama-13b": 0.176, "llama-65b": 0.415, "llama-70b": 0.181, "falcon-40b": 0.184}
"""Figure 22: points of hit rate."""
HBM_AND_DRAM = {"llama-13b": 0.034, "llama-65b": 0.017, "llama-70b": 0.077, "falcon-40b": 0.191}
"""Figure 24; HBM alone is nearly 0, and with SSD it is Figure 13."""
CAPACITY = {0.1: 0.51, 0.25: 0.98}
"""Figure 23: by RCC/CCpUT."""
ARRIVALS = {0.5: 0.82, 2.0: 0.77}
"""Figure 25: by sessions a second."""


CAPACITY_RATIOS = (0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0)
SESSION_RATES = (0.5, 1.0, 1.5, 2.0)
READ_GB_PER_S = (1, 2.5, 5, 10, 20)
MULTIPLES = (0.1, 0.25, 0.5, 0.75, 1.0)
MODEL_NAMES = tuple(MODEL_HITS)

HITS = Panel(
    "all_hit_rate",
    "hits of all turns",
    parts=(("all_dram_hit_rate", "in DRAM"), ("all_ssd_hit_rate", "on SSD")),
    ceiling="later_turn_share",
)
ALL_HITS = Panel("all_hit_rate", "hits of all turns", ceiling="later_turn_share")
GPU_HOURS = Panel("gpu_s", "GPU hours of prefill", is_share=False, unit=3600.0)
LATER_HITS = Panel("hit_rate", "hits of later turns")


_NAMES = {Overflow.DECOUPLED: "truncated, still valid", Overflow.INVALIDATE: "invalidated"}


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e12:g} TB" if size_bytes >= TB else f"{size_bytes / 2**30:g} GiB"


def _policies(load: Load, policies: Sequence[str], _: Census) -> list[SweepRun]:
    return [
        SweepRun(
            f"{_size(load.dram_bytes)} + {_size(ssd_bytes)}",
            policy,
            policy,
            replace(load, ssd_bytes=ssd_bytes),
            paper=POLICIES.get((ssd_bytes, policy), {}),
        )
        for ssd_bytes in (SMALL_SSD_BYTES, LARGE_SSD_BYTES)
        for policy in policies
    ]


def _models(load: Load, policies: Sequence[str], _: Census) -> list[SweepRun]:
    return [
        SweepRun(
            model,
            policy,
            policy,
            MODELS[model].served(load),
            paper={"all_hit_rate": MODEL_HITS[model]} if policy == "look-ahead" else {},
        )
        for model in MODEL_NAMES
        for policy in policies
    ]


def _overflow(load: Load, policies: Sequence[str], _: Census) -> list[SweepRun]:
    """The paper's two ways: what it reached with one, less what it lost by the other."""
    lost = {
        Overflow.DECOUPLED: dict.fromkeys(MODEL_NAMES, 0.0),
        Overflow.INVALIDATE: LOST_BY_INVALIDATION,
    }
    return [
        SweepRun(
            model,
            _NAMES[overflow],
            policies[0],
            replace(MODELS[model].served(load), overflow=overflow),
            paper={"all_hit_rate": MODEL_HITS[model] - lost[overflow][model]},
        )
        for model in MODEL_NAMES
        for overflow in Overflow
    ]


def _tiers(load: Load, policies: Sequence[str], _: Census) -> list[SweepRun]:
    hbm_and_dram = HBM_BYTES + load.dram_bytes
    tiers = (
        ("HBM", HBM_BYTES, 0, dict.fromkeys(MODEL_NAMES, 0.0)),
        ("HBM + DRAM", hbm_and_dram, 0, HBM_AND_DRAM),
        ("HBM + DRAM + SSD", hbm_and_dram, load.ssd_bytes, MODEL_HITS),
    )
    return [
        SweepRun(
            model,
            tier,
            policies[0],
            replace(MODELS[model].served(load), dram_bytes=dram_bytes, ssd_bytes=ssd_bytes),
            paper={"all_hit_rate": known[model]},
        )
        for model in MODEL_NAMES
        for tier, dram_bytes, ssd_bytes, known in tiers
    ]


def _capacity(load: Load, policies: Sequence[str], census: Census) -> list[SweepRun]:
    needed_bytes = census.cache_bytes(load.context_tokens, load.token_bytes)
    return [
        SweepRun(
            ratio,
            policy,
            policy,
            _with_total(load, int(ratio * needed_bytes)),
            paper={"hit_rate": CAPACITY[ratio]} if policy == "look-ahead" and ratio in CAPACITY else {},
        )
        for policy in policies
        for ratio in CAPACITY_RATIOS
    ]


def _with_total(load: Load, total_bytes: int) -> Load:
    dram_bytes = min(load.dram_bytes, total_bytes)
    return replace(load, dram_bytes=dram_bytes, ssd_bytes=total_bytes - dram_bytes)


def _arrivals(load: Load, policies: Sequence[str], census: Census) -> list[SweepRun]:
    usual = census.sessions_per_s
    return [
        SweepRun(
            rate,
            policy,
            policy,
            load,
            sessions_times=rate / usual,
            paper={"all_hit_rate": ARRIVALS[rate]} if policy == "look-ahead" and rate in ARRIVALS else {},
        )
        for policy in policies
        for rate in SESSION_RATES
    ]


def _reads(load: Load, policies: Sequence[str], _: Census) -> list[SweepRun]:
    return [
        SweepRun(gb_per_s, policy, policy, replace(load, ssd_read_bytes_per_s=gb_per_s * 1e9))
        for policy in policies
        for gb_per_s in READ_GB_PER_S
    ]


def _footprint(load: Load, policies: Sequence[str], census: Census) -> list[SweepRun]:
    return [
        SweepRun(multiple, policy, policy, Capacity(multiple).of(load, census.live_bytes))
        for policy in policies
        for multiple in MULTIPLES
    ]


_OF_MODELS = ("model", "context", "token_bytes", "gpus", "prefill")
_QUEUE_POLICIES = ("fifo", "lru", "look-ahead", "value", "belady")
_FEW_POLICIES = ("lru", "look-ahead", "value", "belady")
_ALL = (
    Sweep(
        "models",
        "Hit rate by model",
        "Figure 13",
        "model",
        (HITS,),
        ("look-ahead", "value"),
        LOAD,
        _models,
        decides=_OF_MODELS,
    ),
    Sweep(
        "policies",
        "Policies",
        "Figure 21",
        "DRAM + SSD",
        (HITS, GPU_HOURS),
        _QUEUE_POLICIES,
        LOAD,
        _policies,
        decides=("ssd",),
    ),
    Sweep(
        "overflow",
        "When a context window overflows",
        "Figure 22",
        "model",
        (HITS, GPU_HOURS),
        ("look-ahead",),
        LOAD,
        _overflow,
        has_one_policy=True,
        decides=("overflow", *_OF_MODELS),
    ),
    Sweep(
        "capacity",
        "Capacity for the sessions of a TTL",
        "Figure 23",
        "RCC / CCpUT",
        (LATER_HITS,),
        _FEW_POLICIES,
        replace(LOAD, ttl_s=3600.0),
        _capacity,
        is_lines=True,
        is_sized=False,
        decides=("ssd", "live"),
    ),
    Sweep(
        "tiers",
        "What each tier adds",
        "Figure 24",
        "model",
        (HITS,),
        ("look-ahead",),
        LOAD,
        _tiers,
        has_one_policy=True,
        decides=_OF_MODELS,
    ),
    Sweep(
        "arrivals",
        "How often sessions begin",
        "Figure 25",
        "sessions a second",
        (ALL_HITS,),
        _FEW_POLICIES,
        LOAD,
        _arrivals,
        is_lines=True,
    ),
    Sweep(
        "reads",
        "Bandwidth of SSD reads",
        "",
        "GB/s read from SSD",
        (Panel("dram_share_of_hits", "hits that were in DRAM"),),
        ("look-ahead", "value"),
        LOAD,
        _reads,
        is_lines=True,
        decides=("ssd_read",),
    ),
    Sweep(
        "footprint",
        "Capacity as a multiple of the live footprint",
        "",
        "capacity / live footprint",
        (LATER_HITS,),
        NAMES,
        Load(),
        _footprint,
        is_lines=True,
        is_sized=False,
        is_of_footprint=True,
        decides=("dram", "ssd", "live"),
    ),
)
SWEEPS = {sweep.name: sweep for sweep in _ALL}


_PR_SET_PDEATHSIG = 1


class ReplayLost(CacheError):
    """A process that replayed has ended before its time, mostly for want of memory."""

    reason = "REPLAY_LOST"
    template = "a process that replayed was ended from outside; with fewer --jobs less memory is needed"


def prepare(
    sweep: Sweep,
    trace: PacedTrace,
    load: Load,
    policies: Sequence[str],
    *,
    live_bytes: int | None,
    step: Step,
) -> tuple[Census, list[SweepRun]]:
    """Return what the trace holds and the runs; capacities as if live state peaked at `live_bytes`.

    A warm-up of the paper's is cut to a fifth of a shorter trace. Raises InvalidTrace.
    """
    census = count(trace, load.ttl_s)
    # By what there is, not by what was asked: a short trace would be warm-up alone.
    load = replace(load, warm_up_count=min(load.warm_up_count, census.turn_count // 5))
    if live_bytes or sweep.is_of_footprint:
        census = replace(census, live_bytes=footprint_bytes(trace, load, look(trace), step))
    runs = sweep.make(load, policies, census)
    if live_bytes and sweep.is_sized:
        runs = [run.scaled(census.live_bytes / live_bytes) for run in runs]
        census = replace(census, as_if_bytes=live_bytes)
    return census, runs


def play(
    trace: PacedTrace, runs: Sequence[SweepRun], *, job_count: int, step: Step, done: Callable[[], None]
) -> Iterator[SweepRow]:
    """Give a row per run, in order. `step` hears of turns where there is one job, `done` of ended runs."""
    if job_count == 1:
        for run in runs:
            yield SweepRow(run, _figures(trace, run, step))
            done()
        return
    context = multiprocessing.get_context("spawn")
    workers = min(job_count, len(runs))
    # Not in a `with`: its end would wait for every run, also where the caller has stopped.
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)
    try:
        futures = [pool.submit(_figures, trace, run) for run in runs]
        # All are handed out at once, and rows are yielded in the order of the runs, whichever ends first.
        for future in futures:
            future.add_done_callback(lambda _: done())
        for run, future in zip(runs, futures, strict=True):
            yield SweepRow(run, future.result())
    except BrokenProcessPool as error:
        raise ReplayLost from error
    finally:
        pool.shutdown(cancel_futures=True)


def _figures(trace: PacedTrace, run: SweepRun, step: Step = lambda _what, _done: None) -> dict[str, object]:
    trace = trace.paced(run.sessions_times)
    (outcome,) = study(trace, run.load, [run.policy], [Capacity()], step=step, policy_of=policy_of)
    figures, tally = outcome.to_dict(), outcome.tally
    turns = max(tally.turns, 1)
    return figures | {
        "all_hit_rate": (tally.dram_hits + tally.ssd_hits) / turns,
        "all_dram_hit_rate": tally.dram_hits / turns,
        "all_ssd_hit_rate": tally.ssd_hits / turns,
        "later_turn_share": tally.later_turns / turns,
    }


def _end_with_parent() -> None:
    """A process of the pool leaves at Ctrl-C without a word, and with its parent, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def by_capacity(outcomes: Sequence[StudyOutcome]) -> tuple[Sweep, list[SweepRow]]:
    """The outcomes of a study of prefix blocks, as a sweep: prompt tokens found by capacity."""
    rows = [
        SweepRow(SweepRun(_place(each), each.policy, each.policy, each.load), each.tally.figures())
        for each in outcomes
    ]
    is_of_footprint = all(each.multiple is not None for each in outcomes)
    policies = tuple(dict.fromkeys(each.policy for each in outcomes))
    sweep = Sweep(
        "blocks",
        "Prompt tokens found, by capacity",
        "",
        "capacity / live footprint" if is_of_footprint else "capacity, TB",
        (Panel("prompt_hit_rate", "of all prompt tokens"),),
        policies,
        outcomes[0].load,
        lambda _load, _policies, _census: [],
        is_lines=True,
    )
    return sweep, rows


def _place(outcome: StudyOutcome) -> float:
    total_bytes = outcome.load.dram_bytes + outcome.load.ssd_bytes
    return total_bytes / TB if outcome.multiple is None else outcome.multiple

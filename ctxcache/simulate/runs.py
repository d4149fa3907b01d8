"""Plays a sweep's runs, here or in other processes, and gives rows in the order of the runs.

Every process reads the trace itself. Worst case: one of them is killed; ReplayLost, and the others end.
"""

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

from ctxcache.errors import CacheError
from ctxcache.simulate.census import Census, count
from ctxcache.simulate.future import look
from ctxcache.simulate.load import Load
from ctxcache.simulate.pace import PacedTrace
from ctxcache.simulate.study import Capacity, Step, footprint_bytes, study
from ctxcache.simulate.sweep import Row, Run, Sweep

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
) -> tuple[Census, list[Run]]:
    """Return what the trace holds and the runs; capacities as if live state peaked at `live_bytes`.

    A warm-up of the paper's is cut to a fifth of a shorter trace. Raises InvalidTrace.
    """
    census = count(trace, load.ttl_s)
    load = replace(load, warm_up_count=min(load.warm_up_count, census.turn_count // 5))
    if live_bytes or sweep.is_of_footprint:
        census = replace(census, live_bytes=footprint_bytes(trace, load, look(trace), step))
    runs = sweep.make(load, policies, census)
    if live_bytes and sweep.is_sized:
        runs = [run.scaled(census.live_bytes / live_bytes) for run in runs]
        census = replace(census, as_if_bytes=live_bytes)
    return census, runs


def play(
    trace: PacedTrace, runs: Sequence[Run], *, job_count: int, step: Step, done: Callable[[], None]
) -> Iterator[Row]:
    """Give a row per run, in order. `step` hears of turns where there is one job, `done` of ended runs."""
    if job_count == 1:
        for run in runs:
            yield Row(run, _figures(trace, run, step))
            done()
        return
    context = multiprocessing.get_context("spawn")
    workers = min(job_count, len(runs))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        futures = [pool.submit(_figures, trace, run) for run in runs]
        for future in futures:
            future.add_done_callback(lambda _: done())
        try:
            for run, future in zip(runs, futures, strict=True):
                yield Row(run, future.result())
        except BrokenProcessPool as error:
            raise ReplayLost from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _figures(trace: PacedTrace, run: Run, step: Step = lambda _what, _done: None) -> dict[str, object]:
    trace = trace.paced(run.sessions_times)
    (outcome,) = study(trace, run.load, [run.policy], [Capacity()], step=step)
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

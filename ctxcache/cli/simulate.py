"""`ctxcache simulate`: replays a trace through placement policies and prints what they reach.

Thin: traces, the clock and the counts are `ctxcache.simulate`, imported when the command runs.
Worst case: a line of the trace is wrong; the sentence names file, line and field.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxcache.cli.units import human_size, parse_duration_s

if TYPE_CHECKING:
    from ctxcache.simulate.load import Hint
    from ctxcache.simulate.study import Capacity, Outcome

TITLES = (
    "policy", "capacity", ">hit rate", ">in DRAM", ">on SSD", ">by tokens", ">promoted", ">SSD writes/day",
    ">prefetched", ">in time",
)  # fmt: skip


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(help="CSV or JSON lines, .gz too; docs/placement.md.", exists=True, dir_okay=False),
    ],
    policies: Annotated[
        str, typer.Option(help="Which policies; all of them unless given.", metavar="NAME,...")
    ] = "",
    footprint: Annotated[
        str,
        typer.Option(
            help="Capacities as multiples of the live footprint, not --dram and --ssd.", metavar="X,..."
        ),
    ] = "",
    dram_share: Annotated[float, typer.Option(help="DRAM's share of such capacities.", min=0, max=1)] = 0.06,
    dram: Annotated[str, typer.Option(help="Size of DRAM.", metavar="SIZE")] = "128GiB",
    ssd: Annotated[str, typer.Option(help="Size of SSD.", metavar="SIZE")] = "2TiB",
    buffer_share: Annotated[
        float, typer.Option(help="Share of DRAM kept free for promotions.", min=0, max=1)
    ] = 0.1,
    token_bytes: Annotated[
        int, typer.Option(help="Bytes of state a token; LLaMA-13B's KV.", min=1)
    ] = 819_200,
    ttl: Annotated[str, typer.Option(help="Idle sessions expire after.", metavar="TIME")] = "24h",
    arrivals_times: Annotated[
        float, typer.Option(help="Let turns arrive that many times as fast.", min=1e-6)
    ] = 1.0,
    slots: Annotated[
        int | None,
        typer.Option(help="Turns served at once; others wait in a queue that policies see.", min=1),
    ] = None,
    ssd_read: Annotated[str, typer.Option(help="SSD reads a second.", metavar="SIZE")] = "5GB",
    dram_read: Annotated[str, typer.Option(help="Copies from DRAM a second.", metavar="SIZE")] = "26GB",
    prefill: Annotated[float, typer.Option(help="Tokens a second of prefill in a slot.", min=1e-3)] = 7000.0,
    decode: Annotated[float, typer.Option(help="Tokens a second of decoding in a slot.", min=1e-3)] = 30.0,
    hints: Annotated[
        str, typer.Option(help="What clients say after a turn: ends, returns.", metavar="HINT,...")
    ] = "",
    wrong_hints: Annotated[
        float, typer.Option(help="Share of hints and queue places that lie.", min=0, max=1)
    ] = 0.0,
    warm_up: Annotated[int, typer.Option(help="Turns before counting begins.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line per replay.")] = False,  # noqa: FBT002
) -> None:
    """Replay a trace of sessions through placement policies on a virtual clock, and say what each keeps.

    Hit rates are over turns of sessions that had one before. `belady` knows the future; no store can have it.
    """
    from ctxcache.simulate.load import Load  # noqa: PLC0415  --help needs none of it
    from ctxcache.simulate.study import ALL_POLICIES, study  # noqa: PLC0415  as above
    from ctxcache.simulate.trace import Trace  # noqa: PLC0415  as above

    for value, name in (
        (arrivals_times, "--arrivals-times"), (prefill, "--prefill"), (decode, "--decode"),
    ):  # fmt: skip
        if not math.isfinite(value):
            raise typer.BadParameter(f"{value} is no rate", param_hint=name)
    load = Load(
        token_bytes=token_bytes, dram_bytes=_size(dram, "--dram"), ssd_bytes=_size(ssd, "--ssd"),
        buffer_share=buffer_share, ttl_s=_duration(ttl), ssd_read_bytes_per_s=_rate(ssd_read, "--ssd-read"),
        dram_bytes_per_s=_rate(dram_read, "--dram-read"), prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode, slot_count=slots, hints=_hints(hints), wrong_hint_share=wrong_hints,
        warm_up_count=warm_up,
    )  # fmt: skip
    chosen = _chosen(policies, ALL_POLICIES)
    capacities = _capacities(footprint, dram_share)
    outcomes = []
    with _progress(len(chosen) * len(capacities)) as step:
        for outcome in study(
            Trace(trace, arrivals_times=arrivals_times), load, chosen, capacities, step=step
        ):
            outcomes.append(outcome)
            if as_json:
                typer.echo(json.dumps(outcome.to_dict()))
    if not as_json:
        _show(outcomes)


def _chosen(names: str, known: Sequence[str]) -> list[str]:
    chosen = names.split(",") if names else list(known)
    for name in chosen:
        if name not in known:
            problem = f"no policy is named {name!r}; there are {', '.join(known)}"
            raise typer.BadParameter(problem, param_hint="--policies")
    return chosen


def _capacities(multiples: str, dram_share: float) -> "list[Capacity]":
    from ctxcache.simulate.study import Capacity  # noqa: PLC0415  as above

    if not multiples:
        return [Capacity()]
    try:
        values = [float(text) for text in multiples.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < 1e6 for value in values):
        problem = f"{multiples!r} is not a list of multiples such as 0.25,0.5,1"
        raise typer.BadParameter(problem, param_hint="--footprint")
    return [Capacity(value, dram_share) for value in values]


def _hints(names: str) -> "frozenset[Hint]":
    from ctxcache.simulate.load import Hint  # noqa: PLC0415  as above

    try:
        return frozenset(Hint(name) for name in names.split(",") if names)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; there are ends, returns", param_hint="--hints") from error


def _size(text: str, option: str) -> int:
    from ctxcache.config import SIZE_LIMIT_BYTES, parse_size  # noqa: PLC0415  pydantic

    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if not isinstance(size_bytes, int) or size_bytes > SIZE_LIMIT_BYTES:
        raise typer.BadParameter(f"{text!r} is more than any device has", param_hint=option)
    return size_bytes


def _rate(text: str, option: str) -> int:
    size_bytes = _size(text, option)
    if not size_bytes:
        raise typer.BadParameter("nothing would ever be read", param_hint=option)
    return size_bytes


def _duration(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ttl") from error


def _show(outcomes: "Sequence[Outcome]") -> None:
    from rich.console import Console  # noqa: PLC0415  --help prints no tables
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in TITLES:
        table.add_column(title.removeprefix(">"), justify="right" if title.startswith(">") else "left")
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)


def _cells(outcome: "Outcome") -> tuple[str, ...]:
    figures = outcome.tally.figures()
    sizes = f"{human_size(outcome.load.dram_bytes)} + {human_size(outcome.load.ssd_bytes)}"
    capacity = sizes if outcome.multiple is None else f"{outcome.multiple:g}x ({sizes})"
    rates = (figures[name] for name in ("hit_rate", "dram_hit_rate", "ssd_hit_rate", "token_hit_rate"))
    in_time = f"{figures['prefetch_in_time_share']:.1%}" if outcome.tally.prefetches else "-"
    return (
        outcome.policy, capacity, *(f"{rate:.1%}" for rate in rates), human_size(figures["promoted_bytes"]),
        human_size(figures["ssd_written_bytes_per_day"]), str(outcome.tally.prefetches), in_time,
    )  # fmt: skip


@contextmanager
def _progress(run_count: int) -> Iterator[Callable[[str, int], None]]:
    """Draw on stderr where a person is looking: a bar over the replays, and the turns of this one."""
    from rich.console import Console  # noqa: PLC0415  --help draws no bars
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        task = bars.add_task("replays", total=run_count)
        state = {"runs": 0, "turns": 0}

        def step(what: str, done: int) -> None:
            # The count starts again with each replay; that of the footprint is none of those asked for.
            if done < state["turns"] and what != "footprint":
                state["runs"] += 1
            state["turns"] = done
            bars.update(task, description=f"{what}, {done} turns", completed=state["runs"])

        yield step

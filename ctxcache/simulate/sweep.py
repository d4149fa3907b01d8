"""A sweep: replays that differ in one thing or two, each with its place in a picture. Knows no terminal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ctxcache.simulate.census import Census
from ctxcache.simulate.load import Load


@dataclass(frozen=True, slots=True)
class Run:
    """One replay: its group along the axis, its series, what it is told, and what the paper reached there."""

    x: str | float
    series: str
    policy: str
    load: Load
    sessions_times: float = 1.0
    paper: Mapping[str, float] = field(default_factory=dict)
    """Figures by the names that ours have; shares, not per cent."""

    def scaled(self, factor: float) -> "Run":
        """The run with so many times the capacity; DRAM stays, as turns and prefetches need what they need."""
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
    """What the figure is divided by: 3600 makes hours of seconds."""
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
    make: Callable[[Load, Sequence[str], Census], list[Run]]
    is_lines: bool = False
    is_sized: bool = True
    """Its capacities are bytes, which may be scaled as if the live footprint were another."""
    is_of_footprint: bool = False
    """Its capacities are multiples of the live footprint."""


@dataclass(frozen=True, slots=True)
class Row:
    """A run and the figures it came to."""

    run: Run
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
            "sweep": sweep.name, "source": sweep.source, "x": run.x, "series": run.series, "paper": dict(run.paper),
            "census": asdict(census), "token_bytes": run.load.token_bytes, **self.figures,
        }  # fmt: skip

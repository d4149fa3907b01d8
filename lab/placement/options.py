"""The options of `python -m lab.placement`: those of `ctxcache simulate`, and what sweeps and forms need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ctxcache.cli.documents import Output
from ctxcache.cli.simulate_options import NOT_OF_BLOCKS, Options, Rule, size_rate
from ctxcache.simulate.load import Load
from lab.placement.policies import NAMES
from lab.placement.sweeps import SWEEPS, Sweep


@dataclass(frozen=True, kw_only=True)
class PaperOptions(Options):
    """A sweep decides what is not said."""

    sweep: Annotated[
        str | None,
        typer.Option(help=f"Replay what a figure compares: {', '.join(SWEEPS)}.", metavar="NAME"),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the sweep, or with --blocks each policy by capacity, into this file, .png or .svg.",
            metavar="PATH",
            dir_okay=False,
        ),
    ] = None
    jobs: Annotated[
        int, typer.Option(help="Processes that replay a sweep.", min=1, max=256, show_default="1")
    ] = 1
    live: Annotated[
        str | None,
        typer.Option(help="Scale the sweep's SSD as if live state peaked at so much.", metavar="SIZE"),
    ] = None
    forms: Annotated[
        str | None,
        typer.Option(
            help="Compare forms of state in place of policies: shares of the bytes and of prefill to bring "
            "back, to make; the first is that of sessions in use. kv=1:0,kv_int4=0.31:0.01,tokens=0:1",
            metavar="NAME=BYTES:BACK[:MAKE],...",
        ),
    ] = None

    def played(self) -> Sweep | None:
        """The sweep that was named. Raises BadParameter."""
        if self.sweep is None:
            return None
        if self.sweep not in SWEEPS:
            problem = f"no sweep is named {self.sweep!r}; there are {', '.join(SWEEPS)}"
            raise typer.BadParameter(problem, param_hint="--sweep")
        return SWEEPS[self.sweep]

    def check(self, output: Output) -> None:
        """See Options."""
        sweep = self.played()
        super().check(output)
        if sweep is not None and sweep.has_one_policy and len(self.chosen()) > 1:
            problem = f"--sweep {self.sweep} plays one policy, {len(self.chosen())} are named"
            raise typer.BadParameter(problem, param_hint="--policies")

    def rules(self, output: Output) -> Iterator[Rule]:
        """See Options."""
        sweep = self.played()
        is_at_once = sweep is not None and not self.timed and self.slots is None
        is_at_once = is_at_once and sweep is not None and sweep.preset.slot_count is None
        yield from (
            (_NOT_OF_FORMS if self.forms is not None else (), "of policies; with --forms there are none"),
            (("sweep",) if self.blocks else (), "of sessions; prefix blocks have no tiers and no time"),
            (("live", "jobs") if sweep is None else (), "needs --sweep"),
            (_NOT_OF_SWEEPS if sweep is not None else (), "not of sweeps, which have their own"),
            (() if sweep is None else sweep.decides, f"contradicts --sweep {self.sweep}, which decides it"),
            (() if self.blocks or sweep else ("plot",), "draws sweeps and blocks: needs --sweep or --blocks"),
            (
                ("decode",) if is_at_once else (),
                f"contradicts --sweep {self.sweep}, whose turns take no time",
            ),
        )
        yield from super().rules(output)

    def has_costs(self, output: Output) -> bool:
        """See Options."""
        return self.forms is not None or super().has_costs(output)

    def is_drawn(self) -> bool:
        """See Options."""
        return self.plot is not None

    def preset(self) -> Load:
        """See Options."""
        sweep = self.played()
        return super().preset() if sweep is None else sweep.preset

    def known(self) -> Sequence[str]:
        """See Options."""
        return NAMES

    def usual(self) -> Sequence[str]:
        """See Options."""
        sweep = self.played()
        return NAMES if sweep is None else sweep.policies

    def live_bytes(self) -> int | None:
        """The peak of live state, in bytes."""
        return None if self.live is None else size_rate(self.live, "--live")


_OF_FORMS = ("model", "context", "gpus", "gpu_price", "ssd_price", "ttl")
_NOT_OF_FORMS = (
    *(name for name in NOT_OF_BLOCKS if name not in _OF_FORMS),
    "sweep",
    "blocks",
    "policies",
    "objective",
    "footprint",
    "dram",
    "ssd",
    "hints",
    "wrong_hints",
    "lies",
    "plot",
    "learned_from",
    "spaces",
    "block_tokens",
)
_NOT_OF_SWEEPS = ("footprint", "dram_share", "costs", "learned_from", "block_tokens")

"""Options of `ctxcache simulate` that describe model, machine, time and prices, and what they change of a load.

Worst case: a model or a way to overflow that there is none of; typer's BadParameter names it.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxcache.cli.units import parse_duration_s

if TYPE_CHECKING:
    from ctxcache.simulate.load import Load, Overflow
    from ctxcache.simulate.trace import Pace


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What of a load is said by name here; whatever is not said stays as it is."""

    model: Annotated[
        str | None,
        typer.Option(help="Bytes a token, window, GPUs and prefill of a model by name.", metavar="NAME"),
    ] = None
    context: Annotated[
        int | None, typer.Option(help="Tokens of the context window.", min=1, show_default="no bound")
    ] = None
    overflow: Annotated[
        str | None,
        typer.Option(
            help="State whose window overflows: decoupled (what is left is valid) or invalidate.",
            metavar="HOW",
            show_default="decoupled",
        ),
    ] = None
    segment: Annotated[
        int | None, typer.Option(help="State is kept in segments of so many tokens.", min=1, show_default="1")
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(
            help="Layers of a history that come one behind another, SSD read, copy and prefill at once.",
            min=1,
            show_default="one stage after the other",
        ),
    ] = None
    resident_layers: Annotated[
        int | None,
        typer.Option(
            help="How many of them DRAM has of a session; with --inclusive.", min=1, show_default="all"
        ),
    ] = None
    inclusive: Annotated[
        bool, typer.Option("--inclusive", help="DRAM is a cache of SSD, which is as large as both.")
    ] = False
    timed: Annotated[
        bool, typer.Option("--timed", help="Turns take time, but wait for no slot; not with --slots.")
    ] = False
    ssd_write: Annotated[
        str | None,
        typer.Option(help="SSD writes a second.", metavar="SIZE", show_default="writes take no time"),
    ] = None
    gpus: Annotated[int | None, typer.Option(help="GPUs that prefill together.", min=1, show_default="1")] = (
        None
    )
    gpu_price: Annotated[
        float | None, typer.Option(help="US dollars a GPU and hour.", min=0, show_default="5")
    ] = None
    dram_price: Annotated[
        float | None, typer.Option(help="US dollars a GB of DRAM and hour.", min=0, show_default="0.0088")
    ] = None
    ssd_price: Annotated[
        float | None, typer.Option(help="US dollars a GB of SSD and hour.", min=0, show_default="0.000082")
    ] = None
    session_rate: Annotated[
        float | None,
        typer.Option(help="Sessions that begin a second, for a trace of lengths alone.", min=1e-6),
    ] = None
    think: Annotated[
        str, typer.Option(help="Time between a session's turns, for such a trace.", metavar="TIME")
    ] = "30s"

    def of_model(self, load: "Load") -> "Load":
        """The load with the model that was named."""
        from ctxcache.simulate.models import MODELS  # noqa: PLC0415  --help needs none of it

        if self.model is None:
            return load
        if self.model not in MODELS:
            problem = f"no model is named {self.model!r}; there are {', '.join(MODELS)}"
            raise typer.BadParameter(problem, param_hint="--model")
        return MODELS[self.model].served(load)

    def on_machine(self, load: "Load", ssd_write_bytes_per_s: int | None) -> "Load":
        """The load with everything else that was said. Raises BadParameter."""
        said: dict[str, Any] = {  # replace checks the names, mypy none of the values
            "context_tokens": self.context, "segment_tokens": self.segment, "gpu_count": self.gpus,
            "ssd_write_bytes_per_s": ssd_write_bytes_per_s, "layer_count": self.layers,
            "resident_layer_count": self.resident_layers,
        }  # fmt: skip
        prices = {
            "gpu_hour": _price(self.gpu_price, "--gpu-price"),
            "dram_gb_hour": _price(self.dram_price, "--dram-price"),
            "ssd_gb_hour": _price(self.ssd_price, "--ssd-price"),
        }
        if self.timed and load.slot_count is not None:
            raise typer.BadParameter("turns that have slots take time anyway", param_hint="--timed")
        if self.resident_layers is not None and not (
            self.inclusive and self.resident_layers <= (self.layers or 0)
        ):
            problem = "needs --inclusive, and --layers of at least as many"
            raise typer.BadParameter(problem, param_hint="--resident-layers")
        return replace(
            load, overflow=self._overflow(load), is_inclusive=self.inclusive or load.is_inclusive,
            is_timed=self.timed or load.is_timed,
            prices=replace(load.prices, **{k: v for k, v in prices.items() if v is not None}),
            **{name: value for name, value in said.items() if value is not None},
        )  # fmt: skip

    def pace(self) -> "Pace | None":
        """How sessions of a trace without arrivals come; None where that was not said."""
        from ctxcache.simulate.trace import Pace  # noqa: PLC0415  as above

        if self.session_rate is None:
            return None
        if not math.isfinite(self.session_rate):
            raise typer.BadParameter(f"{self.session_rate} is no rate", param_hint="--session-rate")
        try:
            return Pace(self.session_rate, parse_duration_s(self.think))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--think") from error

    def _overflow(self, load: "Load") -> "Overflow":
        from ctxcache.simulate.load import Overflow  # noqa: PLC0415  as above

        if self.overflow is None:
            return load.overflow
        try:
            return Overflow(self.overflow)
        except ValueError as error:
            problem = f"{self.overflow!r} is none of decoupled, invalidate"
            raise typer.BadParameter(problem, param_hint="--overflow") from error


def _price(value: float | None, option: str) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no price", param_hint=option)
    return value

"""The options of `ctxcache simulate`, a dataclass that typer reads, and what they mean to a simulation.

Worst case: an option is no size, rate or name that is known; typer's BadParameter names it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxcache.cli.documents import Output
from ctxcache.cli.options import OutputOption
from ctxcache.errors import CacheError
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.settings.knobs.knob import parse_duration_s, parse_size_bytes
from ctxcache.settings.knobs.places import SIZE_LIMIT_BYTES
from ctxcache.simulate.load import MODELS, Lie, Load, Objective, Overflow, TraceHint, objective_named
from ctxcache.simulate.models import shape_named
from ctxcache.simulate.study import ALL_POLICIES, Capacity
from ctxcache.simulate.trace import BLOCK_TOKENS, ArrivalPace, names_blocks

Rule = tuple[Sequence[str], str]
"""Options by their names here, and why they would change nothing."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command, in the order of --help. A preset decides what is not said."""

    invoked: typer.Context
    model: Annotated[
        str | None,
        typer.Option(
            help="Bytes a token, window, GPUs and prefill of a model by name, or by its config.json.",
            metavar="MODEL",
        ),
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
        int | None,
        typer.Option(help="State is kept in segments of so many tokens.", min=1, show_default="64"),
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
        bool | None,
        typer.Option(
            "--inclusive/--exclusive",
            help="DRAM is a cache of SSD, which is as large as both; or a session lies in one of them.",
            show_default="inclusive",
        ),
    ] = None
    timed: Annotated[
        bool | None,
        typer.Option(
            "--timed/--instant",
            help="Turns take time, but wait for no slot; or they take none.",
            show_default="timed",
        ),
    ] = None
    closed_loop: Annotated[
        bool | None,
        typer.Option(
            "--closed-loop/--open-loop",
            help="A next turn comes when its user has thought; or when the trace had it come.",
            show_default="closed",
        ),
    ] = None
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
    write_price: Annotated[
        float | None, typer.Option(help="US dollars a TB written to SSD.", min=0, show_default="0.07")
    ] = None
    spare_wear: Annotated[
        bool,
        typer.Option(
            "--spare-wear",
            help="Write only what is expected to save more than its wear, as with `write_cents_per_tb`.",
        ),
    ] = False
    session_rate: Annotated[
        float | None,
        typer.Option(help="Sessions that begin a second, for a trace of lengths alone.", min=1e-6),
    ] = None
    think: Annotated[
        str, typer.Option(help="Time between a session's turns, for such a trace.", metavar="TIME")
    ] = "30s"
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="CSV or JSON lines, .gz too; docs/capacity.md.",
            show_default=False,
        ),
    ]
    policies: Annotated[
        str, typer.Option(help="Which policies; all of them unless given.", metavar="NAME,...")
    ] = ""
    objective: Annotated[
        str | None,
        typer.Option(
            help="What value saves most of: turns, tokens or seconds (of --prefill).",
            metavar="WHAT",
            show_default="seconds; with --blocks tokens",
        ),
    ] = None
    footprint: Annotated[
        str,
        typer.Option(
            help="Capacities as multiples of the live footprint, not --dram and --ssd.", metavar="X,..."
        ),
    ] = ""
    dram_share: Annotated[float, typer.Option(help="DRAM's share of such capacities.", min=0, max=1)] = 0.06
    dram: Annotated[str, typer.Option(help="Size of DRAM.", metavar="SIZE")] = "128GiB"
    ssd: Annotated[str | None, typer.Option(help="Size of SSD.", metavar="SIZE", show_default="2TiB")] = None
    buffer_share: Annotated[
        float, typer.Option(help="Share of DRAM kept free for promotions.", min=0, max=1)
    ] = 0.1
    token_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of state a token.", min=1, show_default="a recording's; else 819200, LLaMA-13B's KV"
        ),
    ] = None
    ttl: Annotated[
        str | None,
        typer.Option(help="Idle sessions expire after.", metavar="TIME", show_default="24h"),
    ] = None
    arrivals_times: Annotated[
        float, typer.Option(help="Let turns arrive that many times as fast.", min=1e-6)
    ] = 1.0
    slots: Annotated[
        int | None,
        typer.Option(
            help="Turns served at once; others wait in a queue that policies see.",
            min=1,
            show_default="no queue",
        ),
    ] = None
    ssd_read: Annotated[str, typer.Option(help="SSD reads a second.", metavar="SIZE")] = "5GB"
    dram_read: Annotated[str, typer.Option(help="Copies from DRAM a second.", metavar="SIZE")] = "26GB"
    prefill: Annotated[
        float | None,
        typer.Option(help="Tokens a second of prefill in a slot.", min=1e-3, show_default="7000"),
    ] = None
    decode: Annotated[
        float | None,
        typer.Option(help="Tokens a second of decoding in a slot.", min=1e-3, show_default="30"),
    ] = None
    hints: Annotated[
        str, typer.Option(help="What clients say after a turn: ends, returns.", metavar="HINT,...")
    ] = ""
    wrong_hints: Annotated[float, typer.Option(help="Share of what is said that is false.", min=0, max=1)] = (
        0.0
    )
    lies: Annotated[
        str,
        typer.Option(
            help="What is false of it: order (a job's place), phantom (a job that never comes), missing "
            "(one that is not told), hint.",
            metavar="LIE,...",
        ),
    ] = "order,hint"
    warm_up: Annotated[
        int | None,
        typer.Option(help="Turns before counting begins.", min=0, show_default="0"),
    ] = None
    costs: Annotated[
        bool, typer.Option("--costs", help="Show what is saved, worn and waited for, not where hits were.")
    ] = False
    output: OutputOption = None
    blocks: Annotated[
        bool,
        typer.Option("--blocks", help="Place prefix blocks, each once whoever has it, not whole sessions."),
    ] = False
    spaces: Annotated[
        bool,
        typer.Option(
            "--spaces", help="Rank each block by itself, as a server ranks those of engines without sessions."
        ),
    ] = False
    block_tokens: Annotated[
        int, typer.Option(help="Tokens of a block: of the trace's hash_ids, or with --blocks.", min=1)
    ] = BLOCK_TOKENS
    learned_from: Annotated[
        Path | None,
        typer.Option(
            help="A trace of the same kind that policies learned from before; with --blocks.", metavar="TRACE"
        ),
    ] = None

    def load(self, preset: Load) -> Load:
        """The machine, the model, the scheduler and the hints; what was not said is the preset's."""
        said: dict[str, Any] = {  # replace checks the names, mypy none of the values
            "token_bytes": self.token_bytes,
            "slot_count": self.slots,
            "warm_up_count": self.warm_up,
            "ssd_bytes": None if self.ssd is None else _size(self.ssd, "--ssd"),
            "ttl_s": None if self.ttl is None else _duration(self.ttl),
            "prefill_tokens_per_s": None if self.prefill is None else _rate(self.prefill, "--prefill"),
            "decode_tokens_per_s": None if self.decode is None else _rate(self.decode, "--decode"),
        }
        ssd_write = None if self.ssd_write is None else size_rate(self.ssd_write, "--ssd-write")
        load = replace(
            self._of_model(preset),
            dram_bytes=_size(self.dram, "--dram"),
            buffer_share=self.buffer_share,
            ssd_read_bytes_per_s=size_rate(self.ssd_read, "--ssd-read"),
            dram_bytes_per_s=size_rate(self.dram_read, "--dram-read"),
            hints=_hints(self.hints),
            wrong_hint_share=self.wrong_hints,
            lies=_lies(self.lies),
            **{name: value for name, value in said.items() if value is not None},
        )
        objective = self.objective or ("tokens" if self.blocks else None)
        if objective is not None:
            load = replace(load, objective=_objective(objective))
        return self._on_machine(load, ssd_write)

    def check(self, output: Output) -> None:
        """Raise BadParameter for an option that was said and would change nothing that is printed.

        That is so beside another that was said, or without one that was not.
        """
        sources = ((name, self.invoked.get_parameter_source(name)) for name in self.invoked.params)
        said = {name for name, source in sources if source is not None and source.name == "COMMANDLINE"}
        for names, problem in (*self.rules(output), *self._unheard()):
            for name in names:
                if name in said:
                    raise typer.BadParameter(problem, param_hint=written(name))
        if "block_tokens" in said and not self.blocks and not names_blocks(self.trace):
            problem = "needs --blocks, or a trace that names blocks"
            raise typer.BadParameter(problem, param_hint="--block-tokens")

    def rules(self, output: Output) -> Iterator[Rule]:
        """Options that would change nothing, with the reason."""
        preset, has_queue = self.preset(), self._has_queue
        has_time = has_queue or (preset.is_timed if self.timed is None else self.timed)
        has_window = self.context is not None or self.model is not None or preset.context_tokens is not None
        has_costs = self.has_costs(output)
        yield from (
            (NOT_OF_BLOCKS if self.blocks else (), "of sessions; prefix blocks have no tiers and no time"),
            (() if self.blocks else ("learned_from", "spaces"), "needs --blocks"),
            (("hints",) if self.spaces else (), "is of sessions; a space of blocks knows none"),
            (() if self.footprint else ("dram_share",), "needs --footprint"),
            (("dram", "ssd") if self.footprint else (), "contradicts --footprint, which says the size"),
            (() if self.session_rate is not None else ("think",), "needs --session-rate"),
            (() if self.wrong_hints else ("lies",), "needs --wrong-hints"),
            (
                () if self.hints or has_queue else ("wrong_hints",),
                "needs --hints or --slots: nothing is said",
            ),
            (
                () if (self.blocks and self.objective == "seconds") or not self.blocks else ("prefill",),
                "needs --objective seconds with --blocks",
            ),
            (
                ("timed",) if self.slots is not None else (),
                "contradicts --slots, whose turns take time",
            ),
            (() if has_time else ("decode",), "contradicts --instant: turns take no time"),
            (("closed_loop",) if not has_time and self.closed_loop else (), "contradicts --instant"),
            (() if has_window else ("overflow",), "needs --context, or a --model that has one"),
            (("costs",) if output is not Output.TABLE else (), "is another table; json and yaml say both"),
            (() if has_costs else _OF_COSTS, "needs --costs, or -o json"),
            (() if has_costs or self.is_drawn() else ("gpus",), "needs --costs, or -o json"),
        )

    def _unheard(self) -> Iterator[Rule]:
        """Hints that no chosen policy reads, and lies about hints that are not given."""
        policies, has_queue = self.chosen(), self._has_queue
        learns, hears_queue = "value" in policies, not _HEAR_QUEUES.isdisjoint(policies)
        kinds, of_queue = _lies(self.lies), {Lie.ORDER, Lie.MISSING}
        rules = (
            ("objective", learns, "none of the --policies weighs misses"),
            ("learned_from", learns, "none of the --policies learns"),
            ("spare_wear", learns, "none of the --policies weighs wear"),
            ("hints", learns, "none of the --policies listens to clients"),
            (
                "wrong_hints",
                (learns and self.hints) or (hears_queue and has_queue),
                "none of the --policies hears what is said",
            ),
            ("lies", self.hints or Lie.HINT not in kinds, "hint needs --hints"),
            ("lies", has_queue or kinds.isdisjoint(of_queue), "order and missing need --slots"),
            ("lies", not self.blocks or Lie.PHANTOM not in kinds, "phantom is of a queue; blocks have none"),
        )
        for name, is_heard, problem in rules:
            if not is_heard:
                yield (name,), problem

    @property
    def _has_queue(self) -> bool:
        return self.slots is not None or self.preset().slot_count is not None

    def has_costs(self, output: Output) -> bool:
        """Whether prices change anything that is printed."""
        return self.costs or output is not Output.TABLE

    def is_drawn(self) -> bool:
        """Whether there is a picture, which may show hours of GPUs."""
        return False

    def preset(self) -> Load:
        """The load of what is not said."""
        return self.realistic()

    def realistic(self) -> Load:
        """The behaviour of a server: DRAM is a cache of SSD, segments of 64 tokens; people who think."""
        if self.blocks:
            return Load()
        has_time = self.timed is not False or self.slots is not None
        return Load(
            is_inclusive=True,
            segment_tokens=SEGMENT_TOKENS,
            is_timed=has_time and self.slots is None,
            is_closed=has_time,
        )

    def arrivals(self) -> float:
        """How many times as fast turns arrive."""
        return _rate(self.arrivals_times, "--arrivals-times")

    def known(self) -> Sequence[str]:
        """Every policy that can be named."""
        return ALL_POLICIES

    def usual(self) -> Sequence[str]:
        """The policies of which none was named."""
        return self.known()

    def chosen(self) -> list[str]:
        """The policies that were named; the usual ones where none was."""
        chosen = self.policies.split(",") if self.policies else list(self.usual())
        known = self.known()
        for name in chosen:
            if name not in known:
                problem = f"no policy is named {name!r}; there are {', '.join(known)}"
                raise typer.BadParameter(problem, param_hint="--policies")
        return chosen

    def capacities(self) -> list[Capacity]:
        """The load's own, or each multiple of the live footprint."""
        if not self.footprint:
            return [Capacity()]
        try:
            values = [float(text) for text in self.footprint.split(",")]
        except ValueError:
            values = []
        if not values or not all(0 < value < 1e6 for value in values):
            problem = f"{self.footprint!r} is not a list of multiples such as 0.25,0.5,1"
            raise typer.BadParameter(problem, param_hint="--footprint")
        return [Capacity(value, self.dram_share) for value in values]

    def _of_model(self, load: Load) -> Load:
        """The load with the model that was named. Raises BadParameter."""
        if self.model is None:
            return load
        if self.model in MODELS:
            return MODELS[self.model].served(load)
        try:
            return shape_named(self.model).model().served(load)
        except CacheError as error:
            raise typer.BadParameter(str(error), param_hint="--model") from error

    def _on_machine(self, load: Load, ssd_write_bytes_per_s: int | None) -> Load:
        """The load with everything else that was said. Raises BadParameter."""
        said: dict[str, Any] = {  # replace checks the names, mypy none of the values
            "context_tokens": self.context,
            "segment_tokens": self.segment,
            "gpu_count": self.gpus,
            "ssd_write_bytes_per_s": ssd_write_bytes_per_s,
            "layer_count": self.layers,
            "resident_layer_count": self.resident_layers,
        }
        prices = {
            "gpu_hour": _price(self.gpu_price, "--gpu-price"),
            "dram_gb_hour": _price(self.dram_price, "--dram-price"),
            "ssd_gb_hour": _price(self.ssd_price, "--ssd-price"),
            "written_tb": _price(self.write_price, "--write-price"),
        }
        is_inclusive = load.is_inclusive if self.inclusive is None else self.inclusive
        if self.resident_layers is not None and not (
            is_inclusive and self.resident_layers <= (self.layers or 0)
        ):
            problem = "needs --inclusive, and --layers of at least as many"
            raise typer.BadParameter(problem, param_hint="--resident-layers")
        return replace(
            load,
            overflow=self._overflow(load),
            is_inclusive=is_inclusive,
            spares_wear=self.spare_wear,
            is_timed=load.is_timed if self.timed is None else self.timed,
            is_closed=load.is_closed if self.closed_loop is None else self.closed_loop,
            prices=replace(load.prices, **{k: v for k, v in prices.items() if v is not None}),
            **{name: value for name, value in said.items() if value is not None},
        )

    def pace(self) -> ArrivalPace | None:
        """How sessions of a trace without arrivals come; None where that was not said."""
        if self.session_rate is None:
            return None
        if not math.isfinite(self.session_rate):
            raise typer.BadParameter(f"{self.session_rate} is no rate", param_hint="--session-rate")
        try:
            return ArrivalPace(self.session_rate, parse_duration_s(self.think))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--think") from error

    def _overflow(self, load: Load) -> Overflow:

        if self.overflow is None:
            return load.overflow
        try:
            return Overflow(self.overflow)
        except ValueError as error:
            problem = f"{self.overflow!r} is none of decoupled, invalidate"
            raise typer.BadParameter(problem, param_hint="--overflow") from error


NOT_OF_BLOCKS = (
    "slots",
    "timed",
    "closed_loop",
    "inclusive",
    "layers",
    "resident_layers",
    "model",
    "context",
    "overflow",
    "segment",
    "dram_share",
    "buffer_share",
    "ssd_read",
    "ssd_write",
    "dram_read",
    "decode",
    "gpus",
    "gpu_price",
    "dram_price",
    "ssd_price",
    "write_price",
    "spare_wear",
    "ttl",
    "warm_up",
    "costs",
)
_OF_COSTS = ("gpu_price", "dram_price", "ssd_price", "write_price")
_HEAR_QUEUES = frozenset({"value", "look-ahead", "belady"})


def written(name: str) -> str:
    """An option as it is said."""
    return f"--{name.replace('_', '-')}"


def _objective(text: str) -> Objective:
    try:
        return objective_named(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--objective") from error


def _hints(names: str) -> frozenset[TraceHint]:
    try:
        return frozenset(TraceHint(name) for name in names.split(",") if names)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; there are ends, returns", param_hint="--hints") from error


def _lies(names: str) -> frozenset[Lie]:
    try:
        return frozenset(Lie(name) for name in names.split(",") if names)
    except ValueError as error:
        raise typer.BadParameter(
            f"{error}; there are {', '.join(each.value for each in Lie)}", param_hint="--lies"
        ) from error


def _rate(value: float, option: str) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no rate", param_hint=option)
    return value


def _size(text: str, option: str) -> int:
    try:
        size_bytes = parse_size_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if size_bytes > SIZE_LIMIT_BYTES:
        raise typer.BadParameter(f"{text!r} is more than any device has", param_hint=option)
    return size_bytes


def size_rate(text: str, option: str) -> int:
    """Bytes a second, as they are said. Raises BadParameter."""
    size_bytes = _size(text, option)
    if not size_bytes:
        raise typer.BadParameter("nothing would ever be read", param_hint=option)
    return size_bytes


def _duration(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ttl") from error


def _price(value: float | None, option: str) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no price", param_hint=option)
    return value

"""`ctxcache size`: how much DRAM and SSD so many users need, what it finds, and what it saves in money.

Thin: the day of users, the replay and the sizes are `ctxcache.simulate`. Worst case: a model is neither known
nor a config.json; the sentence names those that are known.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, cast, get_args

import typer

from ctxcache.cli.documents import Output, Plain, examples
from ctxcache.cli.options import OutputOption, Shared
from ctxcache.cli.simulate import progress
from ctxcache.cli.units import human_size
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.settings.knobs.knob import parse_duration_s
from ctxcache.simulate.crowd import Crowd
from ctxcache.simulate.load import Load
from ctxcache.simulate.models import State, shape_named
from ctxcache.simulate.sizing import MULTIPLES, Sized, all_bytes, bucket_cost, sizes_of

app = typer.Typer()
POLICY = "value"


@app.command(
    "size",
    epilog=examples(
        "ctxcache size --users 10000 --model llama-3-8b --tokens 8000",
        "ctxcache size --users 500 --model deepseek-v3 --tokens 30000 --think 20m -o json",
    ),
)
def size(
    context: typer.Context,
    users: Annotated[int, typer.Option(help="Users of a day.", min=1)],
    model: Annotated[
        str, typer.Option(help="A known name, or a model's config.json or directory.", metavar="MODEL")
    ],
    tokens: Annotated[int, typer.Option(help="Tokens of a conversation at its end, the mean.", min=2)] = 8000,
    conversations: Annotated[float, typer.Option(help="Conversations of a user and day.", min=0.001)] = 2.0,
    turns: Annotated[int, typer.Option(help="Turns of a conversation.", min=1, max=1000)] = 8,
    think: Annotated[
        str, typer.Option(help="Pause between a conversation's turns, the mean.", metavar="TIME")
    ] = "5m",
    busy: Annotated[str, typer.Option(help="Hours of a day in which users come.", metavar="TIME")] = "10h",
    ttl: Annotated[str, typer.Option(help="Idle sessions expire after.", metavar="TIME")] = "24h",
    state: Annotated[State, typer.Option(help="The state that is kept.")] = "kv",
    prefill: Annotated[
        float | None,
        typer.Option(
            help="Tokens a second of prefill, of all GPUs of the model.",
            min=1e-3,
            show_default="from the model's size",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of the model.", min=1, show_default="from the model's size")
    ] = None,
    gpu_price: Annotated[float, typer.Option(help="US dollars a GPU and hour.", min=0)] = 5.0,
    dram_price: Annotated[float, typer.Option(help="US dollars a GB of DRAM and hour.", min=0)] = 0.0088,
    ssd_price: Annotated[float, typer.Option(help="US dollars a GB of SSD and hour.", min=0)] = 0.000082,
    output: OutputOption = None,
) -> None:
    """Say how much DRAM and SSD so many users need, what it finds, and what it saves.

    A sample of the day is drawn and replayed by the policy that serves. `ctxcache simulate` takes a trace.
    """
    before: Shared = context.obj or Shared()
    shared = before.but(None, output, None)
    crowd = Crowd(
        users, conversations, tokens, turns, duration_s(think, "--think"), duration_s(busy, "--busy")
    )
    shape = shape_named(model)
    # As the server has it: DRAM is a cache of SSD, and turns take time.
    served = Load(is_inclusive=True, segment_tokens=SEGMENT_TOKENS, is_timed=True, is_closed=True)
    load = shape.model(state).served(served)
    load = replace(
        load,
        ttl_s=duration_s(ttl, "--ttl"),
        gpu_count=gpus or load.gpu_count,
        prefill_tokens_per_s=prefill or load.prefill_tokens_per_s,
        prices=replace(load.prices, gpu_hour=gpu_price, dram_gb_hour=dram_price, ssd_gb_hour=ssd_price),
    )
    with progress(len(MULTIPLES)) as step:
        sizes = list(sizes_of(crowd, load, POLICY, step=step))
    best = max(sizes, key=lambda sized: sized.net_saved)
    if shared.output is Output.TABLE:
        typer.echo(_text(crowd, load, model, state, sizes, best))
        return
    everything = all_bytes(crowd, load)
    facts = {
        "model": model,
        "state": state,
        "token_bytes": load.token_bytes,
        "token_bytes_by_state": {each: shape.token_bytes(each) for each in get_args(State)},
        "gpu_count": load.gpu_count,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "conversations_per_day": crowd.conversation_count,
        "all_bytes_of_a_ttl": everything,
        "bucket_cost": bucket_cost(everything),
        "best": sizes.index(best),
        "sizes": [asdict(sized) | {"net_saved": sized.net_saved} for sized in sizes],
    }
    shared.show_facts(cast("Mapping[str, Plain]", facts), "")


def duration_s(text: str, option: str) -> float:
    """Seconds of a span such as 5m. Raises BadParameter."""
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _text(crowd: Crowd, load: Load, model: str, state: State, sizes: list[Sized], best: Sized) -> str:
    everything = all_bytes(crowd, load)
    heads = ("DRAM", "SSD", "found", "GPU h/day", "saves", "costs", "left")
    rows = [
        (
            human_size(sized.dram_bytes),
            human_size(sized.ssd_bytes),
            f"{sized.prompt_hit_rate:.0%}",
            f"{sized.gpu_hours_saved_per_day:,.1f}",
            *(f"{money:,.0f} $" for money in (sized.gpu_saved, sized.storage_cost, sized.net_saved)),
        )
        for sized in sizes
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    marks = [" ", *("*" if sized is best else " " for sized in sizes)]
    table = [
        f"{mark} {'  '.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))}"
        for mark, row in zip(marks, (heads, *rows), strict=True)
    ]
    sentences = [
        (
            f"{crowd.user_count:,} users a day, each {crowd.conversations_per_user:g} conversations of "
            f"{crowd.token_count:,} tokens in {crowd.turn_count} turns."
        ),
        (
            f"{model}: {load.token_bytes:,} bytes a token ({state}), prefill "
            f"{load.prefill_tokens_per_s:,.0f} tokens/s, GPUs: {load.gpu_count}. Money is of a month."
        ),
        "",
        *table,
        "",
        (
            f"Best: {human_size(best.dram_bytes)} of DRAM and {human_size(best.ssd_bytes)} of SSD find "
            f"{best.prompt_hit_rate:.0%} of all prompt tokens."
        ),
        (
            f"A day writes {human_size(round(best.written_bytes_per_day))}, "
            f"{best.written_bytes_per_day / best.ssd_bytes:.1f} times the SSD: see its endurance."
        ),
        (
            f"All conversations of a TTL are {human_size(everything)}, in an object store "
            f"{bucket_cost(everything):,.0f} $."
        ),
    ]
    if load.context_tokens is not None and crowd.token_count > load.context_tokens:
        sentences.append(f"The window of {load.context_tokens:,} tokens is shorter than a conversation.")
    return "\n".join(sentences)

#!/usr/bin/env python3
"""The cost of cutting a full context: perplexity, and retrieval from what was kept, by each way to cut.

    python -m lab.studies.truncation                       # SmolLM2-135M on the Python language reference
    python -m lab.studies.truncation --text wiki.txt.gz --window 1024 --tokens 4088 --json
    python -m lab.studies.truncation --model DIR --ids IDS.json.gz --window 256 --no-retrieval

Source: CachedAttention, USENIX ATC '24, section 4.3.5, Tables 1 and 2. Exits with 1 where the default cut is
further from recomputation than --bound, or the naive one closer than five times its perplexity: then the
harness is broken.
"""

import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gpu_worker.model.proof import adapt
from lab.demo.machine import physical_core_count, this_machine
from lab.demo.models import load_model, smollm2
from lab.demo.text import passages
from lab.quality.truncation import Cut, accuracies, perplexities

LEAST_NAIVE = 5.0


def main(
    *,
    model: Annotated[
        Path | None, typer.Option(help="A local transformers model directory; SmolLM2-135M.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text, .gz too; the Python language reference.")] = None,
    ids: Annotated[Path | None, typer.Option(help="Token ids as a JSON list, .gz too, not --text.")] = None,
    window: Annotated[int, typer.Option(help="Tokens of a full context; half of it goes.", min=16)] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens of text to read.", min=32)] = 4096,
    sinks: Annotated[int, typer.Option(help="First tokens that the default keeps.", min=1)] = 4,
    retrieval: Annotated[bool, typer.Option(help="Ask for facts, too.")] = True,
    bound: Annotated[float, typer.Option(help="Most that the default may be above recomputation.")] = 0.03,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure, print, judge."""
    torch.set_num_threads(physical_core_count())
    path = model or smollm2()
    loaded, tokenizer = load_model(path)
    adapter = adapt(loaded)

    def encode(words: str) -> list[int]:
        return list(tokenizer.encode(words, add_special_tokens=False))

    token_ids = json.loads(_read(ids)) if ids else encode(_read(text) if text else _reference())
    token_ids = token_ids[:tokens]
    fits = len(token_ids) <= loaded.config.max_position_embeddings
    cuts = [cut for cut in Cut if fits or cut is not Cut.NONE]
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        task = bars.add_task("perplexity", total=len(cuts) * len(token_ids))

        def step(cut: Cut, count: int) -> None:
            bars.update(task, description=cut.value, completed=cuts.index(cut) * len(token_ids) + count)

        predicted = perplexities(adapter, token_ids, cuts, window=window, sink_count=sinks, step=step)
        task = bars.add_task("retrieval", total=None)
        found = (
            accuracies(adapter, token_ids, encode, cuts, window=window, sink_count=sinks) if retrieval else {}
        )
    standard = predicted[Cut.RECOMPUTE].perplexity
    rows = [
        {
            "cut": cut.value,
            "perplexity": predicted[cut].perplexity,
            "over_recompute": predicted[cut].perplexity / standard - 1,
            "retrieved_share": found.get(cut),
        }
        for cut in cuts
    ]
    if as_json:
        about = {
            "model": path.name,
            "text": str((ids or text or Path("python reference")).name),
            "window": window,
            "sinks": sinks,
            "scored_tokens": predicted[Cut.RECOMPUTE].token_count,
            "machine": this_machine().title,
        }
        print(json.dumps({**about, "cuts": rows}, indent=1))
    else:
        _show(rows)
    default, naive = predicted[Cut.SINKS].perplexity, predicted[Cut.NAIVE].perplexity
    if default > standard * (1 + bound) or naive < LEAST_NAIVE * standard:
        sys.exit(
            f"not as it must be: default {default / standard - 1:+.1%}, naive {naive / standard:.1f} times"
        )


def _read(path: Path) -> str:
    return gzip.open(path, "rt").read() if path.suffix == ".gz" else path.read_text()


def _reference() -> str:
    return "\n\n".join(paragraph for passage in passages() for paragraph in passage.paragraphs)


def _show(rows: Sequence[Mapping[str, object]]) -> None:
    table = Table(box=None, header_style="bold")
    for title in ("cut", "perplexity", "over recompute", "retrieved"):
        table.add_column(title, justify="left" if title == "cut" else "right")
    for row in rows:
        share = row["retrieved_share"]
        table.add_row(
            str(row["cut"]),
            f"{row['perplexity']:.3f}",
            f"{row['over_recompute']:+.2%}",
            "-" if share is None else f"{share:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

#!/usr/bin/env python3
"""What rows in fewer bits cost in predictions, and what they save in bytes.

    python benchmarks/quantization.py --text wikitext2_test.txt.gz --json

Exits with 1 where hidden states in 8 bits with groups of 32 and outliers are further from the kept cache than --bound.
"""

import gzip
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from ctxcache.format.streams import StateKind
from gpu_worker.demo.loading import load_model
from gpu_worker.demo.machine import physical_core_count, this_machine
from gpu_worker.demo.models import smollm2
from gpu_worker.demo.text import passages
from gpu_worker.families import adapt
from gpu_worker.quality.divergence import Form, divergences, few_bits, half, one_scale

HIDDEN, KV = StateKind.HIDDEN, StateKind.KV
DEFAULT = "hidden states, 8 bits, groups of 32, 4 outliers"
FORMS = (
    Form("K/V, bfloat16", KV, half(torch.bfloat16)),
    Form("hidden states, bfloat16", HIDDEN, half(torch.bfloat16)),
    Form("K/V, 8 bits, groups of 64, 4 outliers", KV, few_bits(8, 64)),
    Form(DEFAULT, HIDDEN, few_bits(8, 32)),
    Form("hidden states, 8 bits, groups of 64, 4 outliers", HIDDEN, few_bits(8, 64)),
    Form("hidden states, 8 bits, groups of 32", HIDDEN, few_bits(8, 32, 0)),
    Form("hidden states, 8 bits, one step a token", HIDDEN, one_scale(8)),
    Form("K/V, 4 bits, groups of 32, 4 outliers", KV, few_bits(4, 32)),
    Form("hidden states, 4 bits, groups of 32, 4 outliers", HIDDEN, few_bits(4, 32)),
)


def main(
    *,
    model: Annotated[
        Path | None, typer.Option(help="A local transformers model directory; SmolLM2-135M.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text, .gz too; the Python language reference.")] = None,
    context: Annotated[int, typer.Option(help="Tokens that are stored.", min=16)] = 768,
    tokens: Annotated[int, typer.Option(help="Tokens that are predicted from them.", min=16)] = 256,
    bound: Annotated[float, typer.Option(help="Most KL, in nats a token.")] = 4e-4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure, print, judge."""
    torch.set_num_threads(physical_core_count())
    path = model or smollm2()
    loaded, tokenizer = load_model(path)
    words = _read(text) if text else "\n\n".join(p for passage in passages() for p in passage.paragraphs)
    token_ids = list(tokenizer.encode(words, add_special_tokens=False))[: context + tokens]
    found = divergences(adapt(loaded), token_ids, FORMS, context_count=context)
    if as_json:
        about = {"model": path.name, "context": context, "predicted": tokens, "machine": this_machine().title}
        print(json.dumps({**about, "forms": {k: asdict(v) for k, v in found.items()}}, indent=1))
    else:
        table = Table(box=None, header_style="bold")
        for title in ("stored", "KL, nats", "perplexity", "same token", "bytes a token"):
            table.add_column(title, justify="left" if title == "stored" else "right")
        for title, one in found.items():
            table.add_row(
                title, f"{one.kl_nats:.2g}", f"{one.perplexity:.3f}", f"{one.agreement:.1%}",
                f"{one.bytes_per_token:,.0f}",
            )  # fmt: skip
        Console().print(table)
    if found[DEFAULT].kl_nats > bound:
        sys.exit(
            f"not as it must be: {DEFAULT} diverge by {found[DEFAULT].kl_nats:.2g} nats, {bound:g} allowed"
        )


def _read(path: Path) -> str:
    return gzip.open(path, "rt").read() if path.suffix == ".gz" else path.read_text()


if __name__ == "__main__":
    typer.run(main)

#!/usr/bin/env python3
"""The loss of rows in fewer bits in predictions, and their saving in bytes.

    python -m lab.studies.quantization --text wikitext2_test.txt.gz --json
    python -m lab.studies.quantization --store --text wikitext2_test.txt.gz --json
    python -m lab.studies.quantization --retrieval 24 --text wikitext2_test.txt.gz
    python -m lab.studies.quantization --passages 16 --text wikitext2_test.txt.gz

With --retrieval, so many facts in a context are asked for behind it: sentences in a text ("needle"), and a
list of keys with numbers ("recall"). With --store, through a real store: what its packed kinds take on disk,
and how long saving and restoring by them takes. With --passages, the same losses on so many passages spread
over the text: the mean, the worst passage, the worst token of all. Exits with 1 where hidden states in 8 bits
with groups of 32 and outliers are further from the kept cache than --bound.
"""

import gzip
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ctxcache.format.packing import LOSSY_KINDS
from ctxcache.format.streams import StateKind
from gpu_worker.families import Adapter
from gpu_worker.forms.rounding import Roundings
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from lab.demo.embedded_store import embedded_store
from lab.demo.machine import physical_core_count, this_machine
from lab.demo.models import load_model, mha_twin, smollm2
from lab.demo.text import passages
from lab.quality.divergence import (
    Divergence,
    Form,
    Stored,
    divergences,
    few_bits,
    half,
    logits_of,
    one_scale,
    restored_through,
    stored,
)
from lab.quality.retrieval import Trial, recalled, trials

HIDDEN, KV = StateKind.HIDDEN, StateKind.KV
CHARACTERS_PER_TOKEN = 20
"""More than any text has: what is cut off is not needed."""
KINDS = (
    "kv",
    "hidden",
    "kv_int8",
    "hidden_int8",
    "int8",
    "kv_int4",
    "hidden_int4",
    "delta4",
    "delta3",
    "delta2",
)
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
    ids: Annotated[
        Path | None, typer.Option(help="Token ids instead of a text, a JSON list, .gz too.")
    ] = None,
    has_twin: Annotated[bool, typer.Option("--mha", help="The model's twin with as many K/V heads.")] = False,
    store: Annotated[bool, typer.Option("--store", help="Save to a store and restore from it.")] = False,
    passage_count: Annotated[int, typer.Option("--passages", help="Passages to spread over.", min=0)] = 0,
    retrieval: Annotated[int, typer.Option(help="Facts to ask for; 0: none.", min=0, max=24)] = 0,
    plans: Annotated[str, typer.Option(help="Kinds to store, with --store and --retrieval.")] = ",".join(
        KINDS
    ),
    careful: Annotated[
        bool, typer.Option("--careful", help="Deltas are rounded for K and V, as aging does.")
    ] = False,
    bound: Annotated[float, typer.Option(help="Most KL, in nats a token.")] = 4e-4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure, print, judge."""
    torch.set_num_threads(physical_core_count())
    path = mha_twin(model or smollm2()) if has_twin else model or smollm2()
    tokenizer = None
    if ids:
        loaded, token_ids = _model(path), json.loads(_read(ids))
    else:
        loaded, tokenizer = load_model(path)
        words = _read(text) if text else "\n\n".join(p for passage in passages() for p in passage.paragraphs)
        if not passage_count:
            words = words[: CHARACTERS_PER_TOKEN * (context + tokens)]
        token_ids = list(tokenizer.encode(words, add_special_tokens=False))
    if passage_count:
        wanted = _spread(token_ids, context + tokens, passage_count)
        _report_passages(_on_passages(loaded, wanted, context, plans.split(","), is_careful=careful))
        return
    token_ids = token_ids[: context + tokens]
    about = {"model": path.name, "context": context, "predicted": tokens, "machine": this_machine().title}
    if retrieval:
        _report_retrieval(
            about,
            _retrieved(
                loaded, trials(token_ids, context, retrieval, tokenizer), plans.split(","), is_careful=careful
            ),
            as_json=as_json,
        )
        return
    if store:
        _report_stored(
            about,
            _through_a_store(loaded, token_ids, context, plans.split(","), is_careful=careful),
            bound,
            as_json=as_json,
        )
        return
    found = divergences(adapt(loaded), token_ids, FORMS, context_count=context)
    if as_json:
        print(json.dumps({**about, "forms": {k: asdict(v) for k, v in found.items()}}, indent=1))
    else:
        table = Table(box=None, header_style="bold")
        for title in ("stored", "KL, nats", "perplexity", "same token", "bytes a token"):
            table.add_column(title, justify="left" if title == "stored" else "right")
        for title, one in found.items():
            table.add_row(
                title,
                f"{one.kl_nats:.2g}",
                f"{one.perplexity:.3f}",
                f"{one.agreement:.1%}",
                f"{one.bytes_per_token:,.0f}",
            )
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    if found[DEFAULT].kl_nats > bound:
        sys.exit(
            f"not as it must be: {DEFAULT} diverge by {found[DEFAULT].kl_nats:.2g} nats, {bound:g} allowed"
        )


def _through_a_store(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    context: int,
    kinds: Sequence[str],
    *,
    is_careful: bool,
    repeat_count: int = 3,
) -> dict[str, Stored]:
    """Each kind for all layers.

    `int8` is K/V for the last half of them and hidden states before; `delta4` and the like are deltas of
    so many bits on what token ids give, `delta4on8` and `delta4on4` on a layer in 8 or 4 bits.
    """
    adapter = adapt(model)
    spec = model_spec(model, model_id="measured", weights_digest="measured", packed_kinds=LOSSY_KINDS)
    with embedded_store(2 << 30) as running:
        plans = _plans(len(adapter.layers) - 1, kinds)
        return stored(
            adapter,
            running.client,
            spec,
            plans,
            token_ids,
            context_count=context,
            repeat_count=repeat_count,
            rounding=_rounding(adapter, is_careful=is_careful),
        )


def _spread(token_ids: Sequence[int], count: int, passage_count: int) -> list[Sequence[int]]:
    """Passages of `count` tokens, as far from each other as the text allows."""
    last = max(len(token_ids) - count, 0)
    begins = sorted({round(last * number / max(passage_count - 1, 1)) for number in range(passage_count)})
    return [token_ids[begin : begin + count] for begin in begins]


def _on_passages(
    model: PreTrainedModel,
    wanted: Sequence[Sequence[int]],
    context: int,
    kinds: Sequence[str],
    *,
    is_careful: bool,
) -> dict[str, list[Divergence]]:
    """By plan, the divergence on each passage."""
    found: dict[str, list[Divergence]] = {}
    for number, token_ids in enumerate(wanted):
        measured = _through_a_store(model, token_ids, context, kinds, is_careful=is_careful, repeat_count=1)
        for plan, one in measured.items():
            found.setdefault(plan, []).append(one.divergence)
            said = f"{one.divergence.kl_nats:.2e} nats, {one.divergence.worst_token_nats:.2e} at most"
            print(f"passage {number}: {plan} {said}", file=sys.stderr, flush=True)
    return found


def _report_passages(found: Mapping[str, Sequence[Divergence]]) -> None:
    table = Table(box=None, header_style="bold")
    for title in ("stored", "passages", "mean, nats", "worst passage", "worst token"):
        table.add_column(title, justify="left" if title == "stored" else "right")
    for plan, those in found.items():
        means = [one.kl_nats for one in those]
        table.add_row(
            plan,
            str(len(those)),
            f"{mean(means):.2g}",
            f"{max(means):.2g}",
            f"{max(one.worst_token_nats for one in those):.2g}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _rounding(adapter: Adapter, *, is_careful: bool) -> Callable[[int], Tensor | None]:
    return Roundings(adapter).of if is_careful else lambda _layer: None


def _plans(last: int, kinds: Sequence[str]) -> list[str]:
    mixed = f"hidden_int8:0-{last // 2},kv_int8:{last // 2 + 1}-{last}"
    special = {"int8": mixed}
    for bits in (4, 3, 2):
        for name, base in (("", "tokens"), ("on8", "hidden_int8"), ("on4", "hidden_int4")):
            special[f"delta{bits}{name}"] = f"{base}:0,hidden_delta_int{bits}:1-{last}"
    return [special.get(kind, f"{kind}:0-{last}") for kind in kinds]


def _retrieved(
    model: PreTrainedModel, asked: Mapping[str, Trial], kinds: Sequence[str], *, is_careful: bool
) -> dict[str, dict[str, float]]:
    """By plan, the share of each trial's facts that are found; "kept": from the cache that stayed."""
    adapter = adapt(model)
    spec = model_spec(model, model_id="measured", weights_digest="measured", packed_kinds=LOSSY_KINDS)
    plans = _plans(len(adapter.layers) - 1, kinds)
    found: dict[str, dict[str, float]] = {"kept": {}, **{plan: {} for plan in plans}}
    rounding = _rounding(adapter, is_careful=is_careful)
    with embedded_store(2 << 30) as running:
        for title, trial in asked.items():
            kept = DynamicCache(config=model.config)
            logits_of(adapter, kept, trial.token_ids)
            found["kept"][title] = recalled(adapter, kept, trial)
            for plan in plans:
                cache = restored_through(adapter, running.client, spec, plan, trial.token_ids, rounding)
                found[plan][title] = recalled(adapter, cache, trial)
    return found


def _report_retrieval(about: dict[str, object], found: dict[str, dict[str, float]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**about, "retrieval": found}, indent=1))
        return
    table = Table(box=None, header_style="bold")
    for title in ("stored", *found["kept"]):
        table.add_column(title, justify="left" if title == "stored" else "right")
    for plan, shares in found.items():
        table.add_row(plan, *(f"{share:.0%}" for share in shares.values()))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _report_stored(
    about: dict[str, object], found: dict[str, Stored], bound: float, *, as_json: bool
) -> None:
    if as_json:
        print(json.dumps({**about, "plans": {plan: asdict(one) for plan, one in found.items()}}, indent=1))
    else:
        table = Table(box=None, header_style="bold")
        for title in (
            "stored",
            "KL, nats",
            "perplexity",
            "bytes a token",
            "in slots",
            "pass s",
            "save s",
            "restore s",
        ):
            table.add_column(title, justify="left" if title == "stored" else "right")
        for plan, one in found.items():
            table.add_row(
                plan,
                f"{one.divergence.kl_nats:.2g}",
                f"{one.divergence.perplexity:.3f}",
                f"{one.divergence.bytes_per_token:,.0f}",
                f"{one.slot_bytes_per_token:,.0f}",
                f"{one.pass_s:.3f}",
                f"{one.save_s:.3f}",
                f"{one.restore_s:.3f}",
            )
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    for plan, one in found.items():
        if not any(few in plan for few in ("int4", "delta")) and one.divergence.kl_nats > bound:
            sys.exit(
                f"not as it must be: {plan} diverges by {one.divergence.kl_nats:.2g} nats, {bound:g} allowed"
            )


def _model(path: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True
    )
    loaded.train(mode=False)
    return loaded


def _read(path: Path) -> str:
    return gzip.open(path, "rt").read() if path.suffix == ".gz" else path.read_text()


if __name__ == "__main__":
    typer.run(main)

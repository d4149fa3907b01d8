#!/usr/bin/env python3
"""Shadow decoding: an answer's tokens are decoded once more beside it, without the thoughts before them.

    python -m lab.studies.shadow                     # SmolLM2-135M on this machine's CPU
    python -m lab.studies.shadow --device cuda

An agent that calls back at once leaves no time behind a reply. Its edit could be computed within the reply:
while the answer is decoded, each of its tokens goes through the model a second time, as another row of the
same batch, behind a history without the thoughts. When the reply ends, the next rendering is there.

```
   row 0   [ history | thought | a n s w e r ]     what the user is sent
   row 1   [ history |           a n s w e r ]     the same tokens, forced
```

Ways to have the answer's rows behind that history, of the same tokens:

    shadow   a step of two rows in the place of one, for each token of the answer
    behind   one pass over the answer, when the reply has ended: what the next call waits for today
    chunks   passes over runs of the answer, each between two steps of the reply

The three are measured in turns, round by round; ratios are those of medians. A shadow wins where its extra
time a token is less than a token's share of the pass behind. Its rows are compared with those of a pass.
"""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, DynamicCache, PreTrainedModel

from gpu_worker.families.generation import prefill
from lab.demo.machine import physical_core_count
from lab.demo.models import load_model, smollm2
from lab.demo.text import passages

THOUGHT_TOKENS = 128
CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round. `plain`: the answer decoded alone; each other way, with what it adds."""

    history_tokens: int
    answer_tokens: int
    plain_s: float
    shadow_s: float
    behind_s: float
    chunks_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One history's line, as ratios.

    `shadow`: a step of two rows over a step of one, and so the reply with a shadow over the plain one.
    `behind`: the plain reply and the pass behind it. `chunks`: the reply with passes between its steps.
    """

    history_tokens: int
    shadow: float
    behind: float
    chunks: float


def kept(model: PreTrainedModel, ids: Sequence[int]) -> Cache:
    """A cache with these tokens."""
    cache = DynamicCache(config=model.config)
    prefill(model, cache, ids)
    return cache


def decode(model: PreTrainedModel, cache: Cache, ids: Sequence[int], between: Callable[[int], None]) -> None:
    """Run tokens one by one, as a reply is decoded; `between` is called behind each."""
    with torch.inference_mode():
        for number, token in enumerate(ids):
            model(
                input_ids=torch.tensor([[token]], device=model.device), past_key_values=cache, use_cache=True
            )
            between(number)


def shadowed(
    model: PreTrainedModel, history: Sequence[int], thought: Sequence[int], answer: Sequence[int]
) -> tuple[float, Cache]:
    """Decode an answer in two rows, of which the second has no thought; the time of the steps, and the cache.

    The shorter row is padded before its begin, and its positions are its own.
    """
    pad = len(thought)
    rows = [[*history, *thought], [*([0] * pad), *history]]
    mask = torch.ones(2, len(history) + pad, dtype=torch.long, device=model.device)
    mask[1, :pad] = 0
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        model(
            input_ids=torch.tensor(rows, device=model.device), attention_mask=mask, position_ids=positions,
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        _settle(model)
        begin_s = time.perf_counter()
        for token in answer:
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            model(
                input_ids=torch.tensor([[token], [token]], device=model.device), attention_mask=mask,
                position_ids=mask.sum(-1, keepdim=True) - 1, past_key_values=cache, use_cache=True,
            )  # fmt: skip
        _settle(model)
        return time.perf_counter() - begin_s, cache


def _settle(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def _timed(model: PreTrainedModel, run: Callable[[], None]) -> float:
    _settle(model)
    begin_s = time.perf_counter()
    run()
    _settle(model)
    return time.perf_counter() - begin_s


def measured(
    model: PreTrainedModel, history: Sequence[int], thought: Sequence[int], answer: Sequence[int]
) -> Round:
    """One round of all ways."""
    plain = kept(model, [*history, *thought])
    plain_s = _timed(model, lambda: decode(model, plain, answer, lambda _number: None))
    shadow_s, _ = shadowed(model, history, thought, answer)
    stripped = kept(model, history)
    behind_s = _timed(model, lambda: _pass(model, stripped, answer))
    full, beside = kept(model, [*history, *thought]), kept(model, history)

    def between(number: int) -> None:
        if (number + 1) % CHUNK_TOKENS == 0:
            prefill(model, beside, answer[number + 1 - CHUNK_TOKENS : number + 1])

    chunks_s = _timed(model, lambda: decode(model, full, answer, between))
    return Round(len(history), len(answer), plain_s, shadow_s, behind_s, chunks_s)


def _pass(model: PreTrainedModel, cache: Cache, ids: Sequence[int]) -> None:
    prefill(model, cache, ids)


def figures(rounds: Sequence[Round]) -> Figures:
    """The ratios of one history's rounds."""

    def median(of: Callable[[Round], float]) -> float:
        return statistics.median(map(of, rounds))

    plain_s = median(lambda one: one.plain_s)
    return Figures(
        rounds[0].history_tokens,
        round(median(lambda one: one.shadow_s) / plain_s, 3),
        round(1 + median(lambda one: one.behind_s) / plain_s, 3),
        round(median(lambda one: one.chunks_s) / plain_s, 3),
    )


def check(
    model: PreTrainedModel, history: Sequence[int], thought: Sequence[int], answer: Sequence[int]
) -> float:
    """How far the shadow's rows are from those of a pass: the greatest difference of a K or V."""
    _, cache = shadowed(model, history, thought, answer)
    right = kept(model, [*history, *answer])
    worst = 0.0
    count = len(history) + len(answer)
    # Any: layers of a cache are of several classes.
    layers: list[tuple[Any, Any]] = list(zip(cache.layers, right.layers, strict=True))
    for layer, own in layers:
        for mine, theirs in ((layer.keys, own.keys), (layer.values, own.values)):
            worst = max(worst, float((mine[1, :, -count:] - theirs[0]).abs().max()))
    return worst


def table(lines: Sequence[Figures]) -> str:
    """Markdown."""
    rows = ["| history | shadow | pass behind | passes between |", "|---|---|---|---|"]
    rows += [
        f"| {line.history_tokens:,} | {line.shadow:.3f} | {line.behind:.3f} | {line.chunks:.3f} |"
        for line in lines
    ]
    return "\n".join([*rows, "", "Each over the reply that is decoded alone."])


def main(
    *,
    model: Annotated[
        Path | None, typer.Option(help="A local transformers model directory; SmolLM2-135M.")
    ] = None,
    device: Annotated[str, typer.Option(help="A device of torch.")] = "cpu",
    histories: Annotated[str, typer.Option(help="Tokens of the history.")] = "256,1024,4096",
    answer: Annotated[int, typer.Option(help="Tokens of the answer.", min=CHUNK_TOKENS)] = 96,
    rounds: Annotated[int, typer.Option(help="Of each history.", min=1)] = 3,
    results: Annotated[Path | None, typer.Option(help="Write every round as a JSON line.")] = None,
) -> None:
    """Measure, check, print a table."""
    torch.set_num_threads(physical_core_count())
    loaded, tokenizer = load_model(model or smollm2())
    loaded.to(torch.device(device))  # type: ignore[arg-type]  # as transformers wraps it
    text = tokenizer.encode("\n".join(line for part in passages() for line in part.paragraphs))
    lines, all_rounds = [], []
    worst = check(loaded, text[:256], text[300:428], text[500 : 500 + CHUNK_TOKENS])
    for count in map(int, histories.split(",")):
        history, thought = text[:count], text[count : count + THOUGHT_TOKENS]
        said = text[count + THOUGHT_TOKENS : count + THOUGHT_TOKENS + answer]
        # The first round of a size is slower than the others.
        measured(loaded, history, thought, said[:CHUNK_TOKENS])
        own = [measured(loaded, history, thought, said) for _ in range(rounds)]
        all_rounds += own
        lines.append(figures(own))
        sys.stderr.write(f"{lines[-1]}\n")
    print(table(lines))
    print(f"greatest difference of a row from one of a pass: {worst:.2g}")
    if results is not None:
        facts = {
            "what": "facts",
            "command": " ".join(["python", "-m", "lab.studies.shadow", *sys.argv[1:]]),
            "machine": f"{physical_core_count()} cores of {platform.machine()}, {device}",
        }
        told = [facts, *({"what": "figures", **asdict(line)} for line in lines)]
        told += [{"what": "round", **asdict(one)} for one in all_rounds]
        results.write_text("".join(json.dumps(row) + "\n" for row in told))


if __name__ == "__main__":
    typer.run(main)

#!/usr/bin/env python3
"""Which models' conversations return to vLLM, by what is saved: small random models, run for real.

    .venv-vllm/bin/python -m lab.engines.families                      # all of them, a table
    .venv-vllm/bin/python -m lab.engines.families --only llama,phi3    # some
    .venv-vllm/bin/python -m lab.engines.families --write lab/notes/vllm_models.md

Each model holds a conversation of three turns; the engine itself keeps nothing between them. Every reply is
compared, token for token, with that of an engine that computes each prompt. `equal` says so, with the share
of the later prompts that was restored; anything else is the engine's or the connector's own last word.
`offloading` is the store behind vLLM's own offloading: there the share is of a new process's prompts.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lab.bench.server import serving
from lab.engines.vllm_process import VllmEngine

STATES = ("blocks", "kv", "hidden")
OFFLOADING = "offloading"
NOT_RUN = "not run"
TURNS = 3
COUNT = 16
QUESTION = 40
SHAPE: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    # Wide, so that replies differ from token to token and a wrong row shows.
    "initializer_range": 0.2,
}
WINDOWS = ("gemma2", "gemma3_text", "gpt_oss", "cohere2")
"""Model types whose layers differ: some keep a window of tokens, some keep all."""
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FULL = {"layer_types": ["full_attention"] * 3, "sliding_window": None}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": EXPERTS | {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "olmo2": {},
    "granite": {},
    "phi3": {"pad_token_id": 0},
    "gemma2": {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3_text": {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gpt_oss": EXPERTS | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "glm4": {"pad_token_id": 0},
    "cohere": {},
    "cohere2": {},
    "smollm3": {"pad_token_id": 0},
    "starcoder2": {},
    "stablelm": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 1024},
}


class Outcome(NamedTuple):
    """The outcome of a model's conversation. `restored`: the share of the later turns' prompts."""

    is_equal: bool
    restored: float
    words: str

    def __str__(self) -> str:
        if self.words:
            return self.words
        return f"{'equal' if self.is_equal else '**differs**'}, {self.restored:.0%}"


def build(family: str, directory: Path, *, seed: int = 0) -> Path:
    """A small model of a family with random weights, in files."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]})
    path = directory / family
    model: Any = AutoModelForCausalLM
    model.from_config(config).save_pretrained(path)
    return path


def options_of(family: str, state: str) -> dict[str, Any]:
    """The options that a user of this family adds to vLLM's command line."""
    is_one_group = family in WINDOWS and state != "blocks"
    return {"disable_hybrid_kv_cache_manager": True} if is_one_group else {}


def question(turn: int) -> list[int]:
    """The user's text of a turn."""
    return [(13 * turn + 7 * i + i * i) % 500 + 3 for i in range(QUESTION + (60 if turn == 0 else 0))]


def last_words(error: Exception) -> str:
    """The line in which an engine says why it ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "Refused: " in line or "Error: " in line]
    return (said or lines or [type(error).__name__])[-1].rpartition("Refused: ")[2][-160:]


def hold(model: Path, family: str, states: Sequence[str], place: Path) -> dict[str, Outcome]:
    """The outcome of a conversation, for each kind of state."""
    outcomes = {}
    try:
        with VllmEngine(model, None, place / "plain.log") as plain:
            prompts: list[list[int]] = []
            replies: list[tuple[int, ...]] = []
            prompt: list[int] = []
            for turn in range(TURNS):
                prompt = [*prompt, *question(turn)]
                reply = plain.turn(prompt, None, COUNT).token_ids
                prompts.append(prompt)
                replies.append(reply)
                prompt = [*prompt, *reply]
    except RuntimeError as error:
        return dict.fromkeys(
            (*states, OFFLOADING), Outcome(is_equal=False, restored=0, words=f"vLLM: {last_words(error)}")
        )
    for state in states:
        with serving(place / state, arena_bytes=1 << 28, ssd_bytes=1 << 30) as server:
            try:
                outcomes[state] = compared(
                    model,
                    state,
                    server.target("tcp"),
                    prompts,
                    replies,
                    place,
                    options_of(family, state),
                )
            except RuntimeError as error:
                outcomes[state] = Outcome(is_equal=False, restored=0, words=last_words(error))
    with serving(place / OFFLOADING, arena_bytes=1 << 28, ssd_bytes=1 << 30) as server:
        try:
            outcomes[OFFLOADING] = offloaded(model, server.target("tcp"), prompts, replies, place)
        except RuntimeError as error:
            outcomes[OFFLOADING] = Outcome(is_equal=False, restored=0, words=last_words(error))
    return outcomes


def offloaded(
    model: Path, target: str, prompts: Sequence[list[int]], replies: Sequence[tuple[int, ...]], place: Path
) -> Outcome:
    """Hold the conversation twice, each time in a new engine that offloads to the store."""
    transfer = {
        "kv_connector": "CtxcacheOffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "lab.engines.offload_on_cpu",
            "cpu_bytes_to_use": 256 << 20,
            "target": target,
        },
    }
    is_equal = True
    restored_count = 0
    for number in range(2):
        log = place / f"{OFFLOADING}-{number}.log"
        with VllmEngine(model, None, log, kv_transfer_config=transfer, enable_prefix_caching=True) as engine:
            for prompt, expected in zip(prompts, replies, strict=True):
                reply = engine.turn(prompt, None, COUNT)
                is_equal = is_equal and reply.token_ids == expected
                restored_count += reply.cached_count if number else 0
    return Outcome(is_equal, restored_count / sum(map(len, prompts)), "")


def compared(
    model: Path,
    state: str,
    target: str,
    prompts: Sequence[list[int]],
    replies: Sequence[tuple[int, ...]],
    place: Path,
    options: Mapping[str, Any],
) -> Outcome:
    """Hold the conversation in an engine with a store."""
    is_equal = True
    restored_count = 0
    with VllmEngine(model, target, place / f"{state}.log", extra={"state": state}, **options) as engine:
        for prompt, expected in zip(prompts, replies, strict=True):
            reply = engine.turn(prompt, "alice", COUNT)
            is_equal = is_equal and reply.token_ids == expected
            restored_count += reply.cached_count
        said = [line for line in engine.log.splitlines() if "context store is not used: " in line]
    if said and not restored_count:
        return Outcome(is_equal, 0, f"not saved: {said[0].partition('is not used: ')[2][:160]}")
    return Outcome(is_equal, restored_count / sum(map(len, prompts[1:])), "")


def main() -> int:
    """Run the families that are asked for; exits with 1 where a reply differs."""
    parser = argparse.ArgumentParser(prog="lab.engines.families", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, separated by commas")
    parser.add_argument("--write", type=Path, help="a page of Markdown whose table is to be replaced")
    options = parser.parse_args()
    families = options.only.split(",")
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"--only: {', '.join(sorted(unknown))} not among {', '.join(FAMILIES)}")
    lines = [
        "| model type | " + " | ".join(f"`state={state}`" for state in STATES) + f" | {OFFLOADING} |",
        "|---" * (len(STATES) + 2) + "|",
    ]
    differs = False
    for number, family in enumerate(families):
        sys.stderr.write(f"\r{number + 1}/{len(families)} {family:<16}")
        with tempfile.TemporaryDirectory(prefix="ctxcache-families-") as directory:
            place = Path(directory)
            outcomes = hold(build(family, place), family, STATES, place)
        differs = differs or any(not one.is_equal and not one.words for one in outcomes.values())
        lines.append(f"| {family} | " + " | ".join(str(one) for one in outcomes.values()) + " |")
        if options.write:
            write_rows(options.write, "table", lines)
    sys.stderr.write("\r" + " " * 40 + "\r")
    print("\n".join(lines))
    return 1 if differs else 0


def write_rows(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put rows into the table of that name in a page of Markdown.

    Rows of another first cell stay; a column that they did not have says so.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    head, _, rest = page.read_text().partition(begin)
    before, _, tail = rest.partition(end)
    header, rule, *rows = lines
    columns = _cells(header)
    old = [_cells(row) for row in before.splitlines()]
    kept = {}
    for cells in old[2:]:
        had = dict(zip(old[0], cells, strict=True))
        if had.get(columns[0]):
            kept[had[columns[0]]] = f"| {' | '.join(had.get(column, NOT_RUN) for column in columns)} |"
    kept |= {_cells(row)[0]: row for row in rows}
    page.write_text(head + begin + "\n".join([header, rule, *kept.values()]) + "\n" + end + tail)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


if __name__ == "__main__":
    sys.exit(main())

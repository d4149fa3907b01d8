"""The support matrix: which architectures of transformers are served by which kind of state, run for real.

    .venv/bin/python -m lab.studies.families                     # all, a table
    .venv/bin/python -m lab.studies.families --only llama,glm4   # some
    .venv/bin/python -m lab.studies.families --write FILE.md

Each architecture is a random model of four layers with windows of 24 tokens. It holds a conversation of three
turns on a real store, by a new engine each turn that keeps nothing. Each turn's logits are compared to those
of a cache that was never dropped: `=` for equal bits in every turn, else the largest difference over the
largest logit. A dash is a kind that the model did not prove. A refused architecture has its reason. Controls:
rows of a layer swapped with another's, and positions off by one, must be seen as different.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

import ctxcache
from ctxcache.client import Client
from ctxcache.errors import CacheError
from ctxcache.format.streams import StateKind
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.families import Adapter, generation
from gpu_worker.families.generation import prefill
from gpu_worker.families.positions import NO_ROPE, Rope
from gpu_worker.model.proof import adapt, difference
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan
from lab.bench.server import serving

VOCABULARY = 97
LAYERS = 4
WINDOW = 24
TURNS = (70, 27, 9)
"""New tokens of each turn; replies are not generated, so that both sides run the same tokens."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OWN_KINDS = (StateKind.KV, StateKind.LATENT, StateKind.KV_AS_CACHED)
SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "ffn_dim": 96,
    "rotary_dim": 8,
    "word_embed_proj_dim": 64,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    # Of encoders that decode, and of decoders with an encoder elsewhere.
    "is_decoder": True,
    "decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
}
MLA: Mapping[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
PADDED: Mapping[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
DOTS3: Mapping[str, Any] = {
    **MLA,
    "shared_experts_intermediate_size": 32,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 64,
    "head_dim": 24,
}
QWEN4: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 32,
    "ngram_vocab_size_base": 100,
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "split_ngram_parts": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "youtu"), MLA),
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 32,
        "key_multiplier": 0.5,
        "attention_in_multiplier": 0.75,
    },
    "qwen3_next": {
        "num_experts": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "shared_intermediate_size": 64,
    },
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    # Each pass computes whole chunks: 32 to sessions of 200 tokens as 256 to some thousand.
    "mamba2": {"head_dim": 16, "num_heads": 8, "state_size": 16, "n_groups": 1, "chunk_size": 32},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 32,
    },
    "phi3-longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        }
    },
    "falcon": {"head_dim": None},
    "falcon-alibi": {"head_dim": None, "alibi": True},
    **dict.fromkeys(
        ("camembert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"), PADDED
    ),
    "xmod": {**PADDED, "default_language": "en_XX"},
    **dict.fromkeys(("modernbert-decoder", "emu3", "mllama"), PADDED),
    **dict.fromkeys(("axk1", "axk2", "glm_moe_dsa", "minicpm3", "bailing_hybrid", "kimi_linear"), MLA),
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "dots3_note_text": DOTS3,
    "dots3_note": {**DOTS3, "hidden_size": 5120},
    **dict.fromkeys(("qwen4_exp_text", "qwen4_exp"), QWEN4),
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": LAYERS},
    "zaya": {"num_experts_per_tok": 1},
    "xlnet": {"d_head": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "zamba2": {
        "layer_types": ["mamba", "hybrid"] * 2,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
    },
    "llama-dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "olmo-clipped": {"clip_qkv": 1.0},
}
NAMES = (
    "afmoe",
    "apertus",
    "arcee",
    "bamba",
    "bitnet",
    "biogpt",
    "bloom",
    "codegen",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "diffllama",
    "doge",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon",
    "falcon-alibi",
    "falcon_mamba",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_neox_japanese",
    "gpt_oss",
    "gptj",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hyperclovax",
    "internlm3",
    "jais2",
    "jamba",
    "jetmoe",
    "lfm2",
    "llama",
    "llama-dynamic",
    "llama4_text",
    "mamba",
    "mamba2",
    "minimax",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "mpt",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo_hybrid",
    "olmo-clipped",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phi3-longrope",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "recurrent_gemma",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "xglm",
    "youtu",
    "falcon_h1",
)


def build(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """A random model of an architecture, the same on every call, wide enough that a wrong row shows."""
    torch.manual_seed(11)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(configured(name), dtype=torch.float32)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(24)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = "norm" in key or "ln_" in key
            if parameter.ndim > 1:
                scale = 4.0 if any(part in key for part in ("emb", "wte", "wpe")) else 1.6
                parameter.copy_(noise * scale / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise * 0.1 + float(is_gain and key.endswith("weight")))
    model.train(mode=False)
    found: PreTrainedModel = model.to(dtype)  # type: ignore[arg-type]  # as torch has it, not transformers
    return found


def configured(name: str) -> PreTrainedConfig:
    """The settings of a small model of an architecture, or of a way to configure it (`falcon-alibi`)."""
    of = CONFIG_MAPPING[name if name in CONFIG_MAPPING else name.partition("-")[0]]
    return _small(of, {**SHAPE, **SPECIAL.get(name, {})})


def _small(of: Any, wanted: Mapping[str, Any]) -> PreTrainedConfig:
    # Any: classes of settings have their tables of names without a type.
    standard, aliases = of(), getattr(of, "attribute_map", {})
    given = {
        key: value
        for key, value in wanted.items()
        if not (value is None and key == "head_dim") and (key in aliases or _has(standard, key))
    }
    text = getattr(of, "sub_configs", {}).get("text_config")
    if text is not None:
        given["text_config"] = _small(type(standard.text_config), wanted)
    config: PreTrainedConfig = of(**given)
    return config


def _has(config: Any, key: str) -> bool:
    # A setting that differs by layer raises when it is asked for as a whole.
    return key in vars(config) or key in getattr(type(config), "__dataclass_fields__", ())


@dataclass(slots=True)
class Row:
    """The outcome of one architecture: differences by type and kind, or why it is refused."""

    name: str
    cells: dict[tuple[str, StateKind | None], str] = field(default_factory=dict)
    refused: str = ""
    seen: int = 0
    """Planted faults that were seen."""
    planted: int = 0


def measured(name: str, client: Client) -> Row:
    """Run one architecture in every type, by every kind that it proves."""
    row = Row(name)
    for label, dtype in DTYPES.items():
        try:
            model = build(name, dtype)
            adapter = adapt(model)
        except CacheError as error:
            row.refused = str(error).partition(": ")[2]
            return row
        for kind in adapter.kinds:
            row.cells[label, kind] = conversation(
                adapter, kind, client, f"{name}-{label}-{kind.name.lower()}"
            )
        if label == "fp32":
            planted = _planted(adapter)
            row.planted, row.seen = len(planted), sum(planted)
    return row


def conversation(adapter: Adapter, kind: StateKind, client: Client, name: str) -> str:
    """Hold a session's turns by one kind; the largest difference of logits, `=` for none, or what failed."""
    model = adapter.model
    spec = model_spec(model, model_id=name)
    layers = range(spec.layer_count)
    kinds = [kind if kind is StateKind.TOKENS else adapter.kind_of(layer, kind) for layer in layers]
    plan = RestorePlan(tuple(Method[each.name] if each else Method.NOTHING for each in kinds))
    generator = torch.Generator().manual_seed(5)
    kept, worst = DynamicCache(config=model.config), 0.0
    for number, count in enumerate(TURNS):
        ids = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
        expected = prefill(model, kept, ids, is_stepwise=adapter.is_stepwise)
        with TransformersEngine(model, client, spec, plan, window=512) as engine, _recording() as logits:
            turn = engine.turn(name, ids, max_new_tokens=0)
            failure = engine.wait(name)
        held = sum(TURNS[:number])
        if failure is not None or turn.reused_token_count != held:
            return f"not restored: {turn.miss_reason or failure}"
        found = logits[-1]
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return f"{worst:.0e}" if worst else "="


def apart(adapter: Adapter) -> float:
    """How far apart logits of transformers itself are, where a session comes in one pass and in many.

    Layers that are computed again from token ids come in one pass.
    """
    model = adapter.model
    generator = torch.Generator().manual_seed(5)
    kept, held, worst = DynamicCache(config=model.config), list[int](), 0.0
    for count in TURNS:
        ids = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
        expected = prefill(model, kept, ids, is_stepwise=adapter.is_stepwise)
        anew = DynamicCache(config=model.config)
        if held:
            prefill(model, anew, held, is_stepwise=adapter.is_stepwise)
        found = prefill(model, anew, ids, is_stepwise=adapter.is_stepwise)
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
        held += ids
    return worst


@contextmanager
def _recording() -> Iterator[list[Tensor]]:
    """Logits behind each prefill of the engine. A hook on the model would be refused as a change of it."""
    found: list[Tensor] = []
    plain = generation.prefill

    def recording(*args: Any, **more: Any) -> Tensor:
        found.append(plain(*args, **more))
        return found[-1]

    generation.prefill = recording
    try:
        yield found
    finally:
        generation.prefill = plain


def _planted(adapter: Adapter) -> list[bool]:
    """Whether each of a few faults, planted one at a time, is seen by the proof."""
    first, *rest = adapter.layers
    last = rest[-1]
    swapped = replace(
        adapter,
        layers=(
            replace(first, projection=last.projection, norm=last.norm),
            *rest[:-1],
            replace(last, projection=first.projection, norm=first.norm),
        ),
    )
    kind = adapter.kinds[-1]
    faults = [difference(swapped, kind)]
    rotary = adapter.rotary
    if rotary is not None and any(layer.rope_key != NO_ROPE for layer in adapter.layers):

        def shifted(example: Tensor, positions: Tensor) -> Mapping[str, Rope]:
            return rotary(example, positions + 1)

        faults.append(difference(replace(adapter, rotary=shifted), kind))
    return [bool(fault) for fault in faults]


def table(rows: Sequence[Row]) -> str:
    """All rows as Markdown."""
    lines = [
        "| architecture | kind of rows | "
        + " | ".join(DTYPES)
        + " | hidden "
        + " | hidden ".join(DTYPES)
        + " |",
        "|---|---|" + "---|" * (2 * len(DTYPES)),
    ]
    for row in rows:
        if row.refused:
            continue
        own = next((kind for kind in OWN_KINDS if ("fp32", kind) in row.cells), None)
        cells = [row.cells.get((label, kind), "-") for kind in (own, StateKind.HIDDEN) for label in DTYPES]
        lines.append(f"| {row.name} | {own.name.lower() if own else '-'} | {' | '.join(cells)} |")
    lines += ["", "| refused | reason |", "|---|---|"]
    lines += [f"| {row.name} | {row.refused} |" for row in rows if row.refused]
    served = [row for row in rows if not row.refused]
    planted, seen = sum(row.planted for row in rows), sum(row.seen for row in rows)
    lines += ["", f"{len(rows)} architectures: {len(served)} served, {len(rows) - len(served)} refused."]
    lines += [f"Planted faults (a swapped layer, positions off by one): {planted}, seen: {seen}."]
    return "\n".join(lines)


def options_of(description: str | None) -> argparse.Namespace:
    """What a study of architectures is asked: `only` some of them, and a page to `write`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="architectures, with commas between")
    parser.add_argument("--write", type=Path, help="a page to write")
    return parser.parse_args()


def main() -> int:
    """Run the command; fails where a planted fault is not seen, or a session did not come back."""
    options = options_of(__doc__)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    names = options.only.split(",") if options.only else NAMES
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="families-") as directory,
        serving(Path(directory) / "store", arena_bytes=256 << 20, ssd_bytes=1 << 30) as server,
        ctxcache.connect(server.target("unix")) as client,
    ):
        for name in names:
            rows.append(measured(name, client))
            print(name, rows[-1].refused or dict(rows[-1].cells), file=sys.stderr, flush=True)
    found = table(rows)
    print(found)
    if options.write:
        options.write.write_text(f"{HEAD}\n{found}\n")
    failed = [row.name for row in rows if row.seen != row.planted or "not" in " ".join(row.cells.values())]
    print(f"failed: {', '.join(failed)}" if failed else "none failed", file=sys.stderr)
    return bool(failed)


HEAD = f"""# Families by kinds of state

`python -m lab.studies.families`, transformers {transformers.__version__}, torch {torch.__version__},
CPU, one thread. Random models of {LAYERS} layers; windows and chunks of {WINDOW} tokens.
Three turns ({", ".join(map(str, TURNS))} tokens) on a real store, by a new engine each turn.
`=`: every turn's logits equal those of a cache that was never dropped, bit by bit; otherwise the largest
difference over the largest logit. `-`: not proven.
"""

if __name__ == "__main__":
    sys.exit(main())

"""Model specs: the streams a model can save, and a fingerprint that is the same everywhere."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from gpu_worker.errors import UnsupportedDtype
from gpu_worker.model.executed import digest_weights
from gpu_worker.model.spec import digest_checkpoint, digest_tokenizer, model_spec
from gpu_worker.planning.plan import Method, RestorePlan


def _tokenizer(*words: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"pad_token": words[0], "unk_token": words[0]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("name", "kind", "row_elements"),
    [
        ("llama", StateKind.KV, 2 * 2 * 16),
        ("qwen3", StateKind.KV, 2 * 2 * 24),
        ("falcon-multi-query", StateKind.KV, 2 * 16),
        ("falcon-new", StateKind.KV, 2 * 2 * 16),
        ("deepseek", StateKind.LATENT, 24 + 8),
    ],
)
def test_every_layer_has_hidden_and_its_own_kind(name: str, kind: StateKind, row_elements: int) -> None:
    """A bf16 model saves [D] hidden rows and rows of each KV head once, two bytes per element."""
    spec = model_spec(build(name, dtype=torch.bfloat16), model_id="m")

    assert StreamSpec(Stream(1, StateKind.HIDDEN), 2 * 64, DType.BFLOAT16) in spec.streams
    assert StreamSpec(Stream(1, kind), 2 * row_elements, DType.BFLOAT16) in spec.streams
    assert len(spec.streams) == 2 * spec.layer_count
    RestorePlan.uniform(Method[kind.name], 3).check(spec)


@pytest.mark.parametrize(
    ("name", "rope", "norm"),
    [
        ("gemma2", '"rope_theta": 10000.0', "rmsnorm+1 eps=1e-06"),
        ("neox", '"partial_rotary_factor": 0.25', "layernorm eps=1e-05"),
        ("deepseek", "interleaved", "rmsnorm eps=1e-06"),
        ("opt", "learned 512", "layernorm eps=1e-05"),
        ("opt-norm-after", "learned 512", "none"),
    ],
)
def test_settings_have_canonical_names(name: str, rope: str, norm: str) -> None:
    """Rotary and norm settings are part of the spec as strings that settings alone decide."""
    spec = model_spec(build(name), model_id="m", weights_digest="w")

    assert rope in spec.rope
    assert spec.norm == norm
    assert spec.is_relocatable is not name.startswith("opt")


def test_fingerprint_is_the_same_in_another_process(tmp_path: Path) -> None:
    """A model saved to disk and loaded by another process has the fingerprint it had here."""
    model = build("qwen2")
    model.save_pretrained(tmp_path)
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M\n"
        "from gpu_worker.model.spec import model_spec\n"
        "print(model_spec(M.from_pretrained(sys.argv[1]), model_id='other').fingerprint().hex())"
    )

    output = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)

    assert output.stdout.decode().strip() == model_spec(model, model_id="m").fingerprint().hex()


def test_one_changed_weight_changes_the_fingerprint() -> None:
    """State of a model is never taken for that of one with a single other weight."""
    model = build("llama")
    before = model_spec(model, model_id="m").fingerprint()
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1.0

    assert model_spec(model, model_id="m").fingerprint() != before


def test_sliding_window_is_part_of_the_fingerprint() -> None:
    """The same weights with another window compute other state and have another fingerprint."""
    spec = model_spec(build("gemma2"), model_id="m", weights_digest="w")

    assert spec.rope.endswith("windows 24,all,24")


def test_same_numbers_in_another_type_are_another_model() -> None:
    """The element type of weights is part of their digest."""
    assert digest_weights(build("llama")) != digest_weights(build("llama", dtype=torch.bfloat16))


def test_checkpoint_digest_is_of_the_files(tmp_path: Path) -> None:
    """Hashing safetensors files needs no model, names its scheme and refuses a directory without them."""
    with pytest.raises(InvalidArgument, match="no safetensors"):
        digest_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"abc")

    assert digest_checkpoint(tmp_path).startswith("files:")
    assert digest_checkpoint(tmp_path) == digest_checkpoint(tmp_path)


def test_tokenizer_digest_is_of_its_vocabulary_not_of_its_use() -> None:
    """Other words give another digest; padding a batch gives the same one."""
    tokenizer = _tokenizer("<unk>", "a", "b")
    before = digest_tokenizer(tokenizer)
    tokenizer(["a", "a b"], padding=True)

    assert digest_tokenizer(tokenizer) == before
    assert digest_tokenizer(_tokenizer("<unk>", "b", "a")) != before


def test_models_of_odd_types_are_refused() -> None:
    """A model in float64 has no row type and is refused."""
    with pytest.raises(UnsupportedDtype, match="float64"):
        model_spec(build("llama", dtype=torch.float64), model_id="m")

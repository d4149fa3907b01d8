"""The real model: run where it is already on disk, or where its wheel is at hand."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from ctxcache.errors import ChecksumMismatch
from lab.demo.building import default_cache_dir
from lab.demo.models import load_model, mha_twin, smollm2
from lab.demo.wheel import SMOLLM2_WHEEL

_WHEEL = os.environ.get("CTXCACHE_TEST_SMOLLM2_WHEEL")
_CACHED = default_cache_dir() / "smollm2-135m-instruct-fp32-1"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Return the model, converted from the wheel if one is named, else from the user's cache."""
    if not _WHEEL:
        return _CACHED
    shutil.copy(_WHEEL, tmp_path / SMOLLM2_WHEEL.file_name)
    return smollm2(tmp_path)


@pytest.mark.skipif(
    not _WHEEL and not _CACHED.is_dir(), reason="SmolLM2 is not on disk; the demo puts it there"
)
def test_it_knows_the_capital_of_france_and_so_does_its_twin(model_dir: Path, tmp_path: Path) -> None:
    """The converted weights make sense, and the twin's logits differ by exactly 0."""
    model, tokenizer = load_model(model_dir)
    twin, _ = load_model(mha_twin(model_dir, tmp_path))
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids

    with torch.inference_mode():
        logits, twin_logits = model(ids).logits, twin(ids).logits

    assert tokenizer.decode(int(logits[0, -1].argmax())) == " Paris"
    assert (logits - twin_logits).abs().max().item() == 0.0


def test_a_wheel_of_other_bytes_makes_no_model(tmp_path: Path) -> None:
    """The pinned checksum stands before the conversion, and the cache stays empty."""
    (tmp_path / SMOLLM2_WHEEL.file_name).write_bytes(b"not a wheel")

    with pytest.raises(ChecksumMismatch):
        smollm2(tmp_path)

    assert not [path for path in tmp_path.iterdir() if path.is_dir()]

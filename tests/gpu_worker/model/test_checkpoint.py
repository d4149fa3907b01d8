"""A model's description from its files is that of the model in memory, so that two engines agree on it."""

from pathlib import Path

import pytest
import torch
from tiny_models import build

from ctxcache.errors import InvalidArgument
from gpu_worker.model.spec import describe_directory, model_spec, spec_from_directory


@pytest.mark.parametrize("family", ["llama", "qwen3", "neox"])
def test_files_and_the_loaded_model_have_one_fingerprint(family: str, tmp_path: Path) -> None:
    """Saved and described, it is the model that it was."""
    model = build(family)
    model.save_pretrained(tmp_path / family)

    spec = spec_from_directory(tmp_path / family)

    assert spec.model_id == family
    assert spec.fingerprint() == model_spec(model, model_id="any").fingerprint()


def test_other_weights_or_another_type_are_another_model(tmp_path: Path) -> None:
    """One weight that changes in the files changes fingerprint and probe, and so does the row type."""
    model = build("llama")
    model.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    model.save_pretrained(tmp_path / "b")

    one, other = (describe_directory(tmp_path / name, model_id="same") for name in "ab")
    half = spec_from_directory(tmp_path / "a", model_id="same", dtype=torch.float16)

    assert len({one.spec.fingerprint(), other.spec.fingerprint(), half.fingerprint()}) == 3
    assert one.probe.values != other.probe.values


def test_a_directory_without_a_model_is_an_error(tmp_path: Path) -> None:
    """It says which directory."""
    with pytest.raises(InvalidArgument, match=str(tmp_path)):
        spec_from_directory(tmp_path)

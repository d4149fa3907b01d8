"""Weights out of safetensors files: what projecting needs, when it needs it, and of the right model only."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_engine import adapter_of, model_of, spec_of, write_weights
from safetensors.torch import load_file, save_file
from sessions import RELATIVE_BOUND, relative_error
from tiny_models import CONFIGS

from ctxcache.errors import InvalidArgument, ModelFingerprintMismatch
from ctxcache.format.streams import StateKind
from gpu_worker.model.spec import digest_checkpoint, model_spec
from gpu_worker.pipeline.compute import Kernels, Modules, Restorer
from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.plan import Method
from gpu_worker.sidecar.attachment import BlocksTarget, slots_of
from gpu_worker.sidecar.model import AttachedModel, AttachedModels, LazyWeights

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_projects_as_its_model_does(family: str, weights: Path) -> None:
    """From files alone, layer by layer, bit for bit."""
    directory = write_weights(family, weights)
    spec = replace(spec_of(family), weights_digest=digest_checkpoint(directory))
    lazy, whole = LazyWeights(directory, spec, CPU), adapter_of(family)
    assert lazy.loaded_bytes == 0
    positions = torch.arange(5)
    hidden = torch.randn(5, whole.hidden_size)

    for layer in range(len(whole.layers)):
        lazy.load(layer)
        mine = Restorer(lazy.adapter, positions).layer(layer, Method.HIDDEN, hidden)
        theirs = Restorer(whole, positions).layer(layer, Method.HIDDEN, hidden)

        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert 0 < lazy.loaded_bytes < sum(part.nbytes for part in model_of(family).parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3", "neox", "deepseek"])
def test_kernels_compute_from_a_workers_weights(
    family: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's kernels on a GPU, interpreted.

    The kernels, where they have such a projection, into the engine's blocks.
    """
    if torch.cuda.is_available():
        pytest.skip("the tiny models are on the host")
    monkeypatch.setattr(
        "gpu_worker.sidecar.model.compute_for",
        lambda _, weights, positions: Kernels(weights, positions, is_fused=True),
    )
    directory = write_weights(family, weights)
    spec = replace(spec_of(family), weights_digest=digest_checkpoint(directory))
    lazy, whole = LazyWeights(directory, spec, CPU), adapter_of(family)
    model = AttachedModel(lazy, known_profile("cpu"))
    count, block_tokens = 21, 4
    hidden = torch.randn(count, whole.hidden_size)
    shape = [(each.head_count, each.head_size) for each in (whole.key, whole.value)]
    cached = model.cached
    if whole.kind is StateKind.LATENT:
        shape = [(cached.head_count, cached.key_size), (cached.head_count, cached.value_size)]
    layers = [[torch.full((8, block_tokens, *half), torch.nan) for half in shape] for _ in whole.layers]
    slots = slots_of([6, 1, 7, 0, 3, 2], block_tokens, count)
    target = BlocksTarget([(keys, values) for keys, values in layers], slots, begin=0, windows=model.windows)

    model.load(1)
    compute = model.compute(torch.arange(count))
    for begin, end in ((0, 8), (8, count)):
        data = hidden[begin:end].view(torch.uint8)
        compute.restore(1, Method.HIDDEN, data, begin, target.room(1, begin, end))

    expected = Restorer(whole, torch.arange(count)).layer(1, Method.HIDDEN, hidden)
    for half, mine in zip(expected, layers[1], strict=True):
        found = mine.flatten(0, 1)[slots]
        assert relative_error(found, half[0].transpose(0, 1)) < RELATIVE_BOUND
        assert int(mine.flatten(0, 1).isnan().all(dim=-1).all(dim=-1).sum()) == 8 * block_tokens - count


def test_a_worker_on_a_gpu_makes_kernels_weights_before_a_restore(weights: Path) -> None:
    """Ready when a restore begins, which waits for them.

    On the host, where nobody takes them, they are not made.
    """
    directory = write_weights("llama", weights)
    lazy = LazyWeights(directory, spec_of("llama"), CPU)
    model = AttachedModel(lazy, known_profile("cpu"))

    model.load(0)
    on_host = dict(model._kernel_weights._known)
    lazy.device = torch.device("cuda")
    model.load(0)

    assert on_host == {}
    assert list(model._kernel_weights._known) == [0]
    assert isinstance(model.compute(torch.arange(3)), Modules)


def test_packed_kinds_are_the_engines_to_say(weights: Path) -> None:
    """A model that saves in few bits is found in the same files, as another model."""
    spec = model_spec(model_of("llama"), model_id="packed", packed_kinds=[StateKind.HIDDEN_INT8])

    found = LazyWeights(write_weights("llama", weights), spec, CPU)

    assert found.spec == spec
    model = AttachedModel(found, known_profile("cpu"))
    plan = model.plan(model.streams([StateKind.HIDDEN_INT8]), 64, 0)
    assert str(plan.restore_plan()) == "hidden_int8:0-2"


def _copied(tmp_path: Path, weights: Path) -> Path:
    directory = tmp_path / "copied"
    directory.mkdir()
    for path in write_weights("llama", weights).iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


def test_files_of_another_model_are_refused(tmp_path: Path, weights: Path) -> None:
    """One weight differs in one bit: its model is another one."""
    directory = _copied(tmp_path, weights)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, directory / "model.safetensors")

    with pytest.raises(ModelFingerprintMismatch, match="weights_digest"):
        LazyWeights(directory, spec_of("llama"), CPU)


@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "shape", "config", "none"])
def test_files_that_cannot_be_used_are_refused(tmp_path: Path, weights: Path, damage: str) -> None:
    """The field is named, whatever is wrong with what lies there."""
    directory = _copied(tmp_path, weights)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-100])
        case "empty":
            path.write_bytes(b"")
        case "missing":
            del tensors["model.norm.weight"]
            save_file(tensors, path)
        case "shape":
            tensors["model.norm.weight"] = torch.zeros(3)
            save_file(tensors, path)
        case "config":
            (directory / "config.json").write_text('{"model_type": "nobody"}')
        case "none":
            path.unlink()

    with pytest.raises(InvalidArgument) as refused:
        LazyWeights(directory, spec_of("llama"), CPU)

    assert refused.value.field == "weights.safetensors_directory"


@pytest.mark.parametrize("digest", ["", "sha:1"])
def test_a_digest_of_no_known_scheme_is_refused(weights: Path, digest: str) -> None:
    """A digest that cannot be checked is not taken on trust."""
    spec = replace(spec_of("llama"), weights_digest=digest)

    with pytest.raises(InvalidArgument, match="scheme"):
        LazyWeights(write_weights("llama", weights), spec, CPU)


def test_a_model_that_is_read_for_long_holds_up_no_other(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of the same model waits for it, and both have one; an engine of another one does not."""
    slow, other = write_weights("llama", weights), write_weights("qwen3", weights)
    begun, goes_on, read = threading.Event(), threading.Event(), list[Path]()

    class Held(LazyWeights):
        def __init__(self, directory: Path, *rest: Any) -> None:
            read.append(directory)
            if directory == slow:
                begun.set()
                assert goes_on.wait(60)
            super().__init__(directory, *rest)

    monkeypatch.setattr("gpu_worker.sidecar.model.LazyWeights", Held)
    models, specs = AttachedModels(CPU, None), {}
    for family, directory in (("llama", slow), ("qwen3", other)):
        specs[directory] = replace(spec_of(family), weights_digest=digest_checkpoint(directory))
    with ThreadPoolExecutor(3) as pool:
        try:
            first = pool.submit(models.get, slow, specs[slow])
            assert begun.wait(60)
            second = pool.submit(models.get, slow, specs[slow])
            pool.submit(models.get, other, specs[other]).result(30)
            assert not first.done()
        finally:
            goes_on.set()
        assert first.result(60) is second.result(60)
    assert sorted(read) == sorted([slow, other])

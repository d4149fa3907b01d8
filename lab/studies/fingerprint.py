"""The cost of describing a model: seconds and memory of its digests and of a probe, and probes' distances.

The look before each turn is timed beside a pass of one token.
`python -m lab.studies.fingerprint [DIRECTORY]`: a model of transformers on disk, by default a random one of
2.1 GB. Peak memory is that of this process above what it had before. Prints a table; asserts nothing.
"""

import resource
import sys
import time
import timeit
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from ctxcache.format.model import ModelProbe, ModelSpec
from gpu_worker.engines.transformers_packed import PackedModel, SequenceCache, Work
from gpu_worker.families.generation import prefill
from gpu_worker.model.executed import digest_execution, digest_weights
from gpu_worker.model.probe import probe_of
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.model.unchanged import Unchanged

T = TypeVar("T")


def main() -> None:
    """Measure and print."""
    model = _model(Path(sys.argv[1])) if len(sys.argv) > 1 else _random()
    weights = sum(part.nbytes for part in model.parameters())
    print(f"{type(model).__name__}, {weights / 1e9:.2f} GB, {sum(1 for _ in model.modules())} modules")
    _timed("digest of weights", lambda: digest_weights(model), weights)
    _timed("digest of all else", lambda: digest_execution(model))
    spec = model_spec(model, model_id="measured", weights_digest="measured")
    kept = _timed("probe", lambda: _probe(model, spec))
    _look(model, spec)
    if len(sys.argv) > 1:
        _compare(model, spec, kept)


def _look(model: PreTrainedModel, spec: ModelSpec) -> None:
    unchanged = Unchanged(model, spec)
    cache = DynamicCache(config=model.config)
    look = min(timeit.repeat(unchanged.check, number=20, repeat=10)) / 20
    step = min(timeit.repeat(lambda: prefill(model, cache, [1]), number=1, repeat=10))
    print(f"{'look before a turn':30} {look * 1e6:.0f} us, {look / step:.4f} of a pass of one token")


def _compare(model: PreTrainedModel, spec: ModelSpec, kept: ModelProbe) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    _say("another number of threads", _probe(model, spec), kept)
    torch.set_num_threads(threads)
    for dtype in (torch.float16, torch.bfloat16):
        rounded = deepcopy(model)
        for parameter in rounded.parameters():
            parameter.data = parameter.data.to(dtype)
        _say(str(dtype).removeprefix("torch."), _probe(rounded, spec), kept)
    for factor in (1.001, 1.01, 1.05):
        changed = deepcopy(model)
        layers = adapt(changed).layers
        _scale(layers[len(layers) // 2].block.mlp, factor)
        _say(f"one layer's MLP times {factor}", _probe(changed, spec), kept)
    model.set_attn_implementation("eager")
    _say("eager attention", _probe(model, spec), kept)
    packed = PackedModel(model)
    found = probe_of(adapt(model), spec, lambda ids: packed.step([Work(SequenceCache(len(ids)), ids)]))
    _say("packed passes", found, kept)


def _scale(module: object, factor: float) -> None:
    before: Callable[[torch.Tensor], torch.Tensor] = module.forward  # type: ignore[attr-defined]
    module.forward = lambda x: before(x) * factor  # type: ignore[attr-defined]


def _say(what: str, found: ModelProbe, kept: ModelProbe) -> None:
    difference = found.difference(kept)
    if difference is not None:
        print(f"{what:30} {difference.measured:.1e} apart, {difference.allowed:g} allowed")


def _probe(model: PreTrainedModel, spec: ModelSpec) -> ModelProbe:
    return probe_of(adapt(model), spec, lambda ids: prefill(model, DynamicCache(config=model.config), ids))


def _timed(what: str, run: Callable[[], T], size_bytes: int = 0) -> T:
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    found = run()
    took = time.perf_counter() - begin
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    rate = f", {size_bytes / took / 1e9:.2f} GB/s" if size_bytes else ""
    print(f"{what:30} {took:.3f} s{rate}, {peak:.0f} MiB more at its peak")
    return found


def _model(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


def _random() -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.train(mode=False)
    return model


if __name__ == "__main__":
    main()

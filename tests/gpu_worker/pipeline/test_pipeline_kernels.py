"""The kernels in the pipeline.

Every family's weights and tables as they take them, beside the engine's own cache.
"""

import pytest
import torch
from sessions import RELATIVE_BOUND, relative_errors, saved_session
from slow_pipelines import DEADLINE_S, poisoned_target, slowed, start
from tiny_models import CONFIGS, build
from torch import nn
from transformers.pytorch_utils import Conv1D

from gpu_worker.model.proof import adapt
from gpu_worker.pipeline.compute import Compute, Kernels, KernelWeights, Modules
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.planning.plan import Method

BF16_BOUND = 0.02
INTERPRETED_S = 100.0


def _errors(
    name: str, plan: str, dtype: torch.dtype, *, is_fused: bool = False, offset: int = 0
) -> list[float]:
    session = saved_session(name, dtype)
    target = poisoned_target(session)
    weights = KernelWeights(session.adapter)
    compute = Kernels(weights, session.positions + offset, is_fused=is_fused)
    # Interpreted kernels take seconds, and many more beside other tests.
    deadline_s = INTERPRETED_S if is_fused else DEADLINE_S
    with (
        slowed() as pipeline,
        start(pipeline, session, target, plan, compute=compute, deadline_s=deadline_s) as restoration,
    ):
        restoration.wait_all()
    return relative_errors(target.cache, session.kept_cache)


@pytest.mark.parametrize("plan", ["hidden:0-2", "saved:0-2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_by_the_reference(name: str, plan: str) -> None:
    """In fp32 to 1e-5, whatever its norm, bias, fusion, rotation or window."""
    assert max(_errors(name, plan, torch.float32)) < RELATIVE_BOUND


def test_weights_that_lie_the_other_way_are_turned() -> None:
    """Conv1D has one row for each input. With as many outputs, nothing but the numbers tells."""
    model = build("opt")
    for attention in [module for module in model.modules() if hasattr(module, "k_proj")]:
        for name in ("k_proj", "v_proj"):
            linear, turned = getattr(attention, name), Conv1D(64, 64)  # type: ignore[no-untyped-call]
            turned.weight, turned.bias = nn.Parameter(linear.weight.T.contiguous()), linear.bias
            setattr(attention, name, turned)
    adapter, rows = adapt(model), torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    targets = [CacheTarget(adapter, 9) for _ in range(2)]
    positions = torch.arange(9)
    ways: tuple[Compute, ...] = Modules(adapter, positions), Kernels(KernelWeights(adapter), positions)
    with torch.no_grad():
        for layer in range(3):
            for compute, target in zip(ways, targets, strict=True):
                compute.restore(layer, Method.HIDDEN, rows.view(torch.uint8), 0, target.room(layer, 0, 9))

    assert max(relative_errors(targets[1].cache, targets[0].cache)) < RELATIVE_BOUND


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_rows_come_back_bit_by_bit_in_bf16(name: str) -> None:
    """Rounded where the engine rounds."""
    assert max(_errors(name, "saved:0-2", torch.bfloat16)) == 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_hidden_states_in_bf16(name: str) -> None:
    """Products are summed up in another order at most."""
    assert max(_errors(name, "hidden:0-2", torch.bfloat16)) < BF16_BOUND


@pytest.mark.parametrize("name", ["qwen3", "neox"])
def test_fused_is_the_reference(name: str) -> None:
    """Head norm and partial rotation through Triton: on a GPU if there is one, else interpreted."""
    if torch.cuda.is_available():
        pytest.skip("the tiny models are on the host; tests/gpu_worker/kernels has the kernels on a GPU")

    assert max(_errors(name, "hidden:0,saved:1-2", torch.float32, is_fused=True)) < RELATIVE_BOUND


def test_positions_off_by_one_are_seen() -> None:
    """So that equality means something."""
    assert max(_errors("llama", "saved:0-2", torch.float32, offset=1)) > 100 * RELATIVE_BOUND

"""A sample of a model's weights: every way in which they are changed is noticed, and nothing else is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import build
from torch import Tensor, nn
from transformers import PreTrainedModel

from gpu_worker.model.weights import RUN_VALUES, RUNS, WeightsWatch


def step(model: PreTrainedModel) -> None:
    """A step of an optimiser."""
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(torch.arange(3, 20)[None]).logits.float().square().mean().backward()
    optimiser.step()
    model.zero_grad()


def load(model: PreTrainedModel) -> None:
    """Another model's weights."""
    model.load_state_dict({name: tensor + 1e-3 for name, tensor in model.state_dict().items()})


def write_unseen(model: PreTrainedModel) -> None:
    """A tensor that shares the memory: torch does not count its writes."""
    for parameter in model.parameters():
        parameter.data.mul_(1.0625)


def write_one(model: PreTrainedModel) -> None:
    """One parameter of many, by one value in five, in the memory that it shares."""
    values = next(iter(model.parameters())).data.view(-1)
    values[:: RUN_VALUES // 3] += 0.5


def replace_data(model: PreTrainedModel) -> None:
    """Memory of other values, of one parameter."""
    parameter = next(iter(model.parameters()))
    parameter.data = parameter.data.clone()


def replace_parameter(model: PreTrainedModel) -> None:
    """Another parameter of the same values."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().clone())
                return


def replace_module(model: PreTrainedModel) -> None:
    """Another module of the same weights."""
    layer: Any = model.base_model.get_submodule("layers.1")
    mine = layer.mlp.up_proj
    layer.mlp.up_proj = nn.Linear(mine.in_features, mine.out_features, bias=False)


WAYS = [step, load, write_unseen, write_one, replace_data, replace_parameter, replace_module]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", WAYS)
def test_a_change_is_noticed_until_it_is_marked(
    change: Callable[[PreTrainedModel], None], dtype: torch.dtype
) -> None:
    """Whatever way it comes, and not any more once the weights are what they are."""
    model = build("llama")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    watch = WeightsWatch(model)
    before = watch.sample()
    change(model)
    assert not watch.sample().is_equal()
    # Taken before the change: passes until then were of the old weights.
    assert before.is_equal()
    watch.mark()
    assert watch.sample().is_equal()


def test_passes_and_moves_of_modes_are_no_change() -> None:
    """Also in inference mode, where tensors have no count of writes."""
    with torch.inference_mode():
        model = build("llama")
        watch = WeightsWatch(model)
        model(torch.arange(3, 20)[None])
        assert watch.sample().is_equal()
        model.train(mode=False)
        assert watch.sample().is_equal()


def test_values_are_looked_at_all_over_a_parameter() -> None:
    """Also of one whose rows lie apart, that is part of another, or that is smaller than a run."""
    whole = torch.zeros(1000, 40)

    def parameter(tensor: Tensor) -> Any:
        module: Any = nn.Module()
        module.weight = nn.Parameter(tensor, requires_grad=False)
        return module

    for tensor in (whole, whole.t(), whole[100:300], torch.zeros(3), torch.zeros(())):
        model = parameter(tensor)
        watch = WeightsWatch(model)
        assert watch.sample().is_equal()
        # Not by the tensor that the model has: torch would count the write.
        model.weight.data.fill_(1)
        assert not watch.sample().is_equal()
        model.weight.data.fill_(0)
    watch = WeightsWatch(parameter(whole))
    for begin in range(0, 1000, 1000 // RUNS):
        whole.numpy()[begin : begin + 1000 // RUNS] = 1
        assert not watch.sample().is_equal(), begin
        whole.numpy()[:] = 0

"""Norms: what a norm module computes, found out by running a copy of it."""

import copy

import torch
from torch import Tensor, nn

from gpu_worker.families.projections import is_unpatched


def norm_kind(norm: nn.Module) -> str:
    """How a norm uses its weight w: `rmsnorm`, `rmsnorm+1` for 1 + w, `layernorm`, or `own`.

    A copy of the module is run with another weight: the model's weight need not be in memory.
    """
    weight = getattr(norm, "weight", None)
    if isinstance(norm, nn.LayerNorm) and is_unpatched(norm):
        return "layernorm"
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not is_unpatched(norm):
        return "own"
    # Mean 0.5 and not 0: an RMS norm and a layer norm must differ on it.
    x = torch.linspace(-1.0, 2.0, len(weight), device="cpu").unsqueeze(0)
    probe = copy.deepcopy(norm).to_empty(device="cpu").float()
    with torch.no_grad():
        for parameter in probe.parameters():
            # 0.5 and not 1: `w` gives half of the normed row, `1 + w` one and a half of it.
            parameter.fill_(0.5)
        out = probe.forward(x)
    normed = x * torch.rsqrt(x.pow(2).mean() + norm_epsilon(norm))
    centred = nn.functional.layer_norm(x, (len(weight),), eps=norm_epsilon(norm))
    for name, expected in (("rmsnorm", normed / 2), ("rmsnorm+1", normed * 1.5), ("layernorm", centred / 2)):
        # Kernels leave any other norm to its module.
        if torch.allclose(out, expected, rtol=1e-4, atol=1e-5):
            return name
    return "own"


def rounds_before_gain(norm: nn.Module) -> bool:
    """Whether an RMS norm in 16 bits rounds a normed row before its gain (Llama), not only behind (OLMo 2).

    A copy of the module is run, as in `norm_kind`.
    """
    size = len(norm.weight)  # type: ignore[arg-type]  # a norm that `norm_kind` knows has a weight [D]
    x = torch.linspace(-1.0, 2.0, size, device="cpu").unsqueeze(0).bfloat16()
    probe = copy.deepcopy(norm).to_empty(device="cpu").bfloat16()
    with torch.no_grad():
        for parameter in probe.parameters():
            # Of many bits, so that rounding twice shows.
            parameter.fill_(0.7)
        out = probe.forward(x)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean() + norm_epsilon(norm))
    gain = torch.tensor(0.7, device="cpu").bfloat16()
    twice, once = normed.bfloat16() * gain, (normed * gain.float()).bfloat16()
    return int((out != twice).sum()) < int((out != once).sum())


def norm_epsilon(norm: nn.Module) -> float:
    """The epsilon that a norm adds to the variance, 0 where it has none."""
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0)


def norm_name(norm: nn.Module | None) -> str:
    """The canonical string of a norm: its kind and its epsilon."""
    if norm is None:
        return "none"
    kind = norm_kind(norm)
    epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    return f"{kind if kind != 'own' else type(norm).__name__} eps={epsilon!r}"

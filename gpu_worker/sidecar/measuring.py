"""Measuring what restores of an attached model take on this machine. Runs in a thread of its own.

Worst case: a busy machine, whose profile is that of a busy machine; drift corrects it.
"""

from collections.abc import Sequence

import torch

from gpu_worker.planning.profile import Profile
from gpu_worker.profiling.hardware import hardware_name
from gpu_worker.profiling.measure import measure_restoring
from gpu_worker.profiling.profile_file import Measured
from gpu_worker.sidecar.model import AttachedModel


def measure(model: AttachedModel, device: torch.device, lengths: Sequence[int]) -> Profile:
    """Measure at these lengths, ascending, and plan by it from here on."""
    for layer in range(model.spec.layer_count):
        model.weights.load(layer)
    measured: Measured = measure_restoring(
        model.weights.adapter, model.weights.shape, hardware=hardware_name(device), lengths=lengths
    )
    model.measured(measured.profile)
    return measured.profile

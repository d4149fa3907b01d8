"""How each Hugging Face model family exposes the state that is saved and restored.

Knows transformers' module names and nothing of the store. Worst case: a family that changed its
modules, which the tests of the family show as an unequal cache.
"""

from gpu_worker.families.adapter import Adapter
from gpu_worker.families.registry import adapt

__all__ = ["Adapter", "adapt"]

"""Model families: how a Hugging Face model exposes the state that is saved and restored.

There is no list of families: `detection.py` looks at modules, and `gpu_worker/model/proof.py` has the loaded
model prove what was found. `generation.py` runs passes and captures their rows. Knows transformers' module
names and nothing of the store. Worst case: a model that is refused with its reason.
"""

from gpu_worker.families.adapter import Adapter

__all__ = ["Adapter"]

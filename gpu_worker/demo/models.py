"""The demo's models, the one place to import them from.

Importing this imports torch and transformers: several seconds.
"""

from gpu_worker.demo.cache_dir import default_cache_dir
from gpu_worker.demo.loading import load_model
from gpu_worker.demo.mha_twin import mha_twin
from gpu_worker.demo.smollm2 import smollm2

__all__ = ["default_cache_dir", "load_model", "mha_twin", "smollm2"]

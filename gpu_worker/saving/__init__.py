"""Saving in two stages: a batch's rows leave the device in one copy, threads sort them into sessions.

Each module says what it knows. Worst case: a slow or broken store, which costs saves and never a token.
"""

from gpu_worker.saving.saver import CapturedPass, Saver
from gpu_worker.saving.staging import Slice

__all__ = ["CapturedPass", "Saver", "Slice"]

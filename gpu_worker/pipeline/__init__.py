"""The pipeline: rows from the store into an engine's cache by a plan, each stage on a lane of its own.

`docs/worker.md` has the rules by which lanes follow one another. Worst case: a clean miss with a reason.
"""

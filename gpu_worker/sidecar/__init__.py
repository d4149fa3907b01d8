"""The sidecar: the GPU worker as a process of its own beside an engine.

Knows the engine by its attachment alone: a model, and memory in which its KV cache lies. Worst case: a
restore that is a miss with a reason, and blocks that are named as invalid.
"""

"""Kernels: what a restore computes on the GPU, each with a reference of the same signature.

`<name>/reference.py` is plain torch and says what is right; `<name>/fused.py` is Triton and says it fast.
Knows tensors only: no store, no model, no engine. Worst case: Triton is not installed, and the references
serve.
"""

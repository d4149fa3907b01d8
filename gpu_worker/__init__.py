"""The GPU worker: saves a model's state to the store and restores its KV cache from it.

Knows torch, transformers and the store's client. Worst case: state that cannot be used, in which
case the session is recomputed from its token ids.
"""

"""Handles: what an engine names memory by, and how that becomes bytes here.

One module per way; each gives a tensor of bytes [size] that keeps the mapping while it lives. The engine's
memory is never unlinked or freed. Worst case: a handle that leads nowhere, or to less than it said.
"""

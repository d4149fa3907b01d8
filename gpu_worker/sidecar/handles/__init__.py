"""Handles: what an engine names memory by, and how that becomes bytes here.

One module per way; each gives a tensor of bytes [size] that keeps the mapping while it lives. Nothing is ever
unlinked or freed of what is the engine's. Worst case: a handle that leads nowhere, or to less than it said.
"""

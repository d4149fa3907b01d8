"""Forms of state: rows as tensors and as bytes, in few bits, as deltas of layers, and snapshots of states.

Knows tensors and the store's formats. Worst case: rows that a form cannot hold are refused before they are
saved.
"""

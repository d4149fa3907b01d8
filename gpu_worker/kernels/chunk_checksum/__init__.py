"""Checksums of chunks where they lie.

The store's own XXH3-64, so that what crossed the bus is what was saved.
"""

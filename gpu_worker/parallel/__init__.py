"""Parallel: one engine on several devices, of which each restores its own part.

Tensor parallel ranks read disjoint tokens and gather them; pipeline stages restore their own layers.
"""

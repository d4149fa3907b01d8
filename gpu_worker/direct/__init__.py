"""Direct storage: what lies on SSD read past the store's arena, into the GPU where that works.

See docs/worker.md.
"""

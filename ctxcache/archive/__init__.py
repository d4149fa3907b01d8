"""Archives.

Sessions in a file, written by `ctxcache export` and read by `ctxcache import`. docs/archive_format.md.
"""

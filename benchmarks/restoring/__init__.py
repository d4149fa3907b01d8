"""The parts of benchmarks/restore.py."""

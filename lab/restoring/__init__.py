"""The parts of lab/studies/restore.py."""

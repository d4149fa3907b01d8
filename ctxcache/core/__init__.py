"""Decisions: arithmetic over facts and time. Nothing here reads a clock, a file or a random number."""

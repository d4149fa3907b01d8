"""Recordings of what a live store was asked: written to files, counted, and played against another store."""

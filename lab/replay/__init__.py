"""Replay: a recording of one store played against another, and both compared."""

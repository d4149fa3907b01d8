"""Faults on purpose, for tests of what lies around a store: only a server that was told to has any of this."""

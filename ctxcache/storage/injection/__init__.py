"""Faults on purpose, for tests of what lies around a store.

Only a server that was told to has any of this.
"""

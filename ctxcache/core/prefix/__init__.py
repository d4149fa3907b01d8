"""Prefixes: state found by the tokens that it belongs to. Pure."""

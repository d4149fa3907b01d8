"""Replays traces through the placement that serves, on a virtual clock."""

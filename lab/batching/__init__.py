"""Continuous batching in small: what loads the saver as a serving engine does."""

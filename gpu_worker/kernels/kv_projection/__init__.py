"""Hidden states -> K and V in the engine's cache: norm, projection, positions and scatter in one pass."""

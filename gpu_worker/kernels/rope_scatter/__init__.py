"""K and V saved before positions -> the engine's cache: rotated, and put where the engine keeps them."""

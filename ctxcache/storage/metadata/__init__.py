"""Records of models, sessions and segments, and the stores that keep them."""

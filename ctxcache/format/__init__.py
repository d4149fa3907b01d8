"""How state is named and laid out in bytes: the leaf package every other one may import."""

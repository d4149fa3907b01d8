"""Sessions in a file: out of a store and into another, by the public client alone."""

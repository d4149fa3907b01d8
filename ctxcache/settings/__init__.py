"""Settings: what each means, its default and bounds, and where it comes from."""

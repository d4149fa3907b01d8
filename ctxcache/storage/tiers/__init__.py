"""Places where segments lie. Concrete tiers are built by `server.py` only."""

"""Where bytes and records lie: tiers, metadata, directories; what opens, claims and mends them."""

"""Placement: which session lies in which tier, and which is next to go. Pure: events in, decisions out."""

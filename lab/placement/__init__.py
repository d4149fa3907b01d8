"""Placement on paper: policies that no server runs, the papers' sweeps, forms of state, and pictures."""

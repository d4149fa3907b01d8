"""Measurements of the store beside the machine's own limits, in one run. Not imported by the server."""

"""`ctxcache doctor`: what this machine offers, and which path is live for each thing."""

"""The command line: serve, look at sessions, and say what this machine offers."""

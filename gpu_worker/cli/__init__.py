"""`ctxcache worker`: plans and profiles at the command line."""

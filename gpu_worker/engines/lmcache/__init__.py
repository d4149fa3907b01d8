"""LMCache: the store as its second tier (`l2`), or as the remote storage of an engine (`remote`)."""

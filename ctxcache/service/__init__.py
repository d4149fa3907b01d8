"""The gRPC edge: validation, conversion and servicers of a few lines per rpc. Decides nothing."""

"""The bytes of a connection: frames, and the one table between errors and gRPC codes."""

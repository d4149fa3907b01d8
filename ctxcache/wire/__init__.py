"""What goes over a connection: frames, and the one table between errors and gRPC codes."""

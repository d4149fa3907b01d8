"""The server's observability: metrics and health over HTTP, and how long its event loop stalls."""

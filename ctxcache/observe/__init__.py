"""What the server shows of itself: metrics and health over HTTP, and how long its event loop stalls."""

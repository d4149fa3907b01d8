"""The parts put together: listening, upkeep, reloading, and a server's life from start to signal."""

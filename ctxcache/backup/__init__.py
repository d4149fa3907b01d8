"""Backups as files: written, read and verified, and laid out as a new data directory."""

"""The cost of truncation in quality, measured on real models with the code that restores sessions."""

"""What truncation costs in quality, measured on real models with the code that restores sessions."""

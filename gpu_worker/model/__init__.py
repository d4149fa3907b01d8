"""Is it the same model: what describes a model, and what is asked of it later."""

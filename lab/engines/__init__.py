"""Engines as their users run them, beside their own ways to keep state. They run in `.venv-vllm`."""

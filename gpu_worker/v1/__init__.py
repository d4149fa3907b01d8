"""Generated from proto/gpu_worker/v1: `make proto`."""

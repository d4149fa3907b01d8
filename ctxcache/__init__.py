"""ctxcache: a context cache for LLM inference. Importing this package imports neither torch nor grpc."""

__version__ = "0.1.0"

"""Generated from proto/ctxcache/v1; do not edit."""

"""Where model directories are kept between runs."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/ctxcache/models`, or the same under `~/.cache`. Creates nothing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ctxcache" / "models"

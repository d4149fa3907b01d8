#!/usr/bin/env python3
"""Write docs/settings.md from ctxcache/settings/knobs; `--check` says whether it is as it should be."""

import sys
from pathlib import Path

from ctxcache.settings.knobs import reference

PATH = Path(__file__).resolve().parent.parent / "docs" / "settings.md"


def main() -> None:
    """Write the document, or compare it."""
    text = reference.markdown()
    if sys.argv[1:] == ["--check"]:
        if not PATH.exists() or PATH.read_text() != text:
            sys.exit("docs/settings.md is not what ctxcache/settings/knobs says: run `make settings`")
        return
    PATH.write_text(text)


if __name__ == "__main__":
    main()

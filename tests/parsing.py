"""Python sources as trees."""

import ast
import gc


def parse(source: str) -> ast.Module:
    """The tree of a source.

    No collection runs meanwhile: before Python 3.11.8 a finalizer or another thread that makes a tree in the
    middle of one ends both in `SystemError: AST constructor recursion depth mismatch`.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()

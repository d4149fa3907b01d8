"""Places where the program may be made another one, by the kind of change; a seed chooses among them.

Only text between a change's offsets is replaced, so that lines keep their numbers. Left out is what no test
is to notice: words of errors, logs and annotations, and constants outside functions, which tune.
"""

import ast
import random
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

from tests.mutants.table import ROOT

ROOMS = {
    "cache": "ctxcache/cache",
    "core/ledger": "ctxcache/core/ledger",
    "storage": "ctxcache/storage",
    "service": "ctxcache/service",
    "wire": "ctxcache/wire",
    "client": "ctxcache/client",
    "engines": "gpu_worker/engines",
}
_OPERATORS = {
    "comparison": {
        "<": "<=",
        "<=": "<",
        ">": ">=",
        ">=": ">",
        "==": "!=",
        "!=": "==",
        "is": "is not",
        "is not": "is",
        "in": "not in",
        "not in": "in",
    },
    "boolean": {"and": "or", "or": "and"},
    "arithmetic": {"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "//", "|": "&", "&": "|"},
}
_ASSIGNMENTS = {"+=": "-=", "-=": "+=", "|=": "=", "&=": "="}
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete)
_GUARDS = (ast.Raise, ast.Return, ast.Continue, ast.Break)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """Text of a file that is replaced: `[begin, end)` of it, in lines `[line, last_line]`."""

    file: str
    begin: int
    end: int
    line: int
    last_line: int
    kind: str
    new: str

    def apply(self, source: str) -> str:
        """The file's text with the change."""
        return source[: self.begin] + self.new + source[self.end :]


def choose(seed: int, room: str, count: int, root: Path = ROOT) -> list[Change]:
    """So many changes of a room, each kind as often as another; fewer where there are no more."""
    by_kind: dict[str, list[Change]] = defaultdict(list)
    for path in sorted((root / ROOMS[room]).rglob("*.py")):
        for change in changes(str(path.relative_to(root)), path.read_text()):
            by_kind[change.kind].append(change)
    chance = random.Random(f"{seed} {room}")
    kinds = sorted(by_kind)
    for kind in kinds:
        chance.shuffle(by_kind[kind])
    chosen: list[Change] = []
    while len(chosen) < count and any(by_kind.values()):
        for kind in kinds:
            while by_kind[kind] and len(chosen) < count:
                change = by_kind[kind].pop()
                if _compiles(change, root):
                    chosen.append(change)
                    break
    return chosen


def changes(file: str, source: str) -> list[Change]:
    """Every change of a file, in order; a few of them do not compile."""
    return sorted(_Finder(file, source).find())


def _compiles(change: Change, root: Path) -> bool:
    try:
        ast.parse(change.apply((root / change.file).read_text()))
    except SyntaxError:
        return False
    return True


class _Finder:
    def __init__(self, file: str, source: str) -> None:
        self._file, self._source = file, source
        lines = source.encode().splitlines(keepends=True)
        self._lines = [line.decode() for line in lines]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def find(self) -> Iterator[Change]:
        for function in ast.walk(ast.parse(self._source)):
            if isinstance(function, _Function):
                yield from self._block(function.body)
                for statement in function.body:
                    yield from self._within(statement)
                yield from self._second_checks(function)

    # -- expressions -------------------------------------------------------------------------------

    def _within(self, node: ast.AST) -> Iterator[Change]:
        # A function within a function is walked by itself.
        if isinstance(node, (_Function, ast.ClassDef, ast.JoinedStr, ast.Raise)) or _is_log(node):
            return
        yield from self._operators(node)
        yield from self._values(node)
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                yield from self._block(value)
            if name != "annotation":
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self._within(child)

    def _operators(self, node: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.Compare):
            for left, right in pairwise([node.left, *node.comparators]):
                yield from self._between("comparison", left, right)
        elif isinstance(node, ast.BoolOp):
            for left, right in pairwise(node.values):
                yield from self._between("boolean", left, right)
        elif isinstance(node, ast.BinOp) and not _is_text(node):
            yield from self._between("arithmetic", node.left, node.right)
        elif isinstance(node, ast.AugAssign):
            begin, end = self._end(node.target), self._begin(node.value)
            if (word := self._source[begin:end].strip()) in _ASSIGNMENTS:
                at = self._source.index(word, begin)
                yield self._change("arithmetic", at, at + len(word), _ASSIGNMENTS[word])

    def _between(self, kind: str, left: ast.expr, right: ast.expr) -> Iterator[Change]:
        begin, end = self._end(left), self._begin(right)
        words = sorted(_OPERATORS[kind], key=len, reverse=True)
        pattern = "|".join(re.escape(word) for word in words)
        if match := re.search(pattern, self._source[begin:end]):
            at, word = begin + match.start(), match[0]
            yield self._change(kind, at, at + len(word), _OPERATORS[kind][word])

    def _values(self, node: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._change("boolean", self._begin(node), self._begin(node.operand), "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield self._change("constant", self._begin(node), self._end(node), str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield self._change("constant", self._begin(node), self._end(node), str(node.value + 1))

    # -- statements --------------------------------------------------------------------------------

    def _block(self, statements: Sequence[ast.AST]) -> Iterator[Change]:
        plain = [s for s in statements if isinstance(s, ast.stmt)]
        for statement in plain:
            if _may_be_dropped(statement):
                yield self._drop("dropped", statement)
        for first, second in pairwise(plain):
            is_simple = all(isinstance(s, _SIMPLE) and not _is_said(s) for s in (first, second))
            if is_simple and _is_ordered(first, second):
                yield self._swap(first, second)

    def _second_checks(self, function: _Function) -> Iterator[Change]:
        """Checks behind an await: what was true before it may be so no more."""
        awaited = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Await)]
        for node in ast.walk(function):
            if isinstance(node, ast.stmt) and _is_check(node) and any(at < node.lineno for at in awaited):
                yield self._drop("second check", node)

    def _drop(self, kind: str, statement: ast.stmt) -> Change:
        # As many lines as before.
        blank = "\n" * ((statement.end_lineno or statement.lineno) - statement.lineno)
        return self._change(kind, self._begin(statement), self._end(statement), f"pass{blank}")

    def _swap(self, first: ast.stmt, second: ast.stmt) -> Change:
        texts = [self._source[self._begin(s) : self._end(s)] for s in (first, second)]
        between = self._source[self._end(first) : self._begin(second)]
        return self._change(
            "swapped", self._begin(first), self._end(second), f"{texts[1]}{between}{texts[0]}"
        )

    # -- places ------------------------------------------------------------------------------------

    def _change(self, kind: str, begin: int, end: int, new: str) -> Change:
        line, last_line = (bisect_right(self._starts, at) for at in (begin, end))
        return Change(self._file, begin, end, line, last_line, kind, new)

    def _offset(self, line: int, column: int) -> int:
        text = self._lines[line - 1]
        # Columns count bytes.
        return self._starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def _begin(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0)


def _is_text(node: ast.BinOp) -> bool:
    """Whether it makes a text, or names types."""
    sides = (node.left, node.right)
    texts = (ast.JoinedStr, ast.List, ast.Tuple)
    return any(
        isinstance(side, texts)
        or (isinstance(side, ast.Constant) and not isinstance(side.value, int | float))
        for side in sides
    )


def _is_log(node: ast.AST) -> bool:
    place = node.func if isinstance(node, ast.Call) else None
    while isinstance(place, ast.Attribute):
        place = place.value
    return isinstance(place, ast.Name) and place.id == "log"


def _is_ordered(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether their order may matter: one calls what may fail or look, or changes what the other names."""
    if any(isinstance(node, ast.Call | ast.Await) for s in (first, second) for node in ast.walk(s)):
        return True
    changed, named = (
        [
            {node.attr if isinstance(node, ast.Attribute) else node.id for node in ast.walk(s) if is_of(node)}
            for s in (first, second)
        ]
        for is_of in (_is_changed, _is_named)
    )
    return bool(changed[0] & named[1] or changed[1] & named[0])


def _is_named(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    return isinstance(node, ast.Name | ast.Attribute)


def _is_changed(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    return _is_named(node) and not isinstance(node.ctx, ast.Load)


def _is_said(node: ast.AST) -> bool:
    """Whether a statement is a text, or logs one."""
    return isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_log(node.value))


def _called(node: ast.stmt) -> ast.Call | None:
    value = node.value if isinstance(node, ast.Expr) else None
    value = value.value if isinstance(value, ast.Await) else value
    return value if isinstance(value, ast.Call) else None


def _may_be_dropped(node: ast.stmt) -> bool:
    # A local name that is not set would be an error at once.
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    if isinstance(node, ast.Expr):
        call = _called(node)
        return call is not None and not _is_log(call)
    return isinstance(node, ast.AugAssign | ast.Delete) or _is_guard(node)


def _is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], _GUARDS)


def _is_check(node: ast.stmt) -> bool:
    call = _called(node)
    name = ast.unparse(call.func).rpartition(".")[2].lstrip("_") if call is not None else ""
    return _is_guard(node) or name.startswith("check")

#!/usr/bin/env python3
"""Print how large the house is: modules, lines, names, imports, comments and words. `--json` for machines.

Reads sources and imports nothing of them. The product is `ctxcache` and `gpu_worker` without generated code.

Two figures say how much is explained. Comments are those behind `#`; the goal of 8 is theirs. Reasons and
pictures stand in docstrings as well: `docstring lines that explain` counts lines, behind a docstring's first
sentence, that draw something or whose sentence has one of the words EXPLAINING. It is a count of words, not a
judgement: it sees neither a reason without such a word, nor a false one.

`--root` counts another checkout.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("ctxcache", "gpu_worker")
OTHERS = ("benchmarks", "lab", "scripts", "tests")
GENERATED = "v1"
COLUMNS = 110
SMALL_LINES = 80
_DIRECTIVE = re.compile(r"\s*# (noqa|type:|fmt:|pragma).*$")
"""Directives at a line's end do not count, as ruff's E501 does not count them."""
EXPLAINING = re.compile(
    r"\b(because|since|so that|so|otherwise|else|therefore|would|must|may not|never|cannot|only|until|before"
    r"|behind|without|unless|worst case|danger)\b",
    re.IGNORECASE,
)
"""Words of a reason, an order, a condition or a danger."""
PICTURE = re.compile(r"[─│┌┐└┘├┤┬┴┼►◄▲▼→←]|-->|<--|^\s+\|.*\|")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


@dataclass(frozen=True)
class Module:
    """One file of the product."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.text)

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """Its tokens."""
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @property
    def lines(self) -> list[str]:
        """Its lines."""
        return self.text.splitlines()

    @property
    def comment_count(self) -> int:
        """Comments that say something, not directives such as `noqa`."""
        directive = re.compile(r"#\s*(noqa|type:|fmt:|pragma|!)")
        return sum(
            token.type == tokenize.COMMENT and not directive.match(token.string) for token in self.tokens
        )

    @property
    def docstrings(self) -> list[str]:
        """Docstrings, and the strings that explain an attribute."""
        return [
            node.value.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ]

    @property
    def explaining_line_count(self) -> int:
        """Lines of docstrings, behind the first sentence, that draw something or have a word of EXPLAINING.

        A sentence that has such a word counts with all lines that it lies on.
        """
        return sum(map(_explaining_lines, self.docstrings))

    @property
    def code_line_count(self) -> int:
        """Lines with code: neither blank, nor comments, nor docstrings and other strings that stand alone."""
        code = {
            line
            for token in self.tokens
            if token.type not in NOT_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(code)

    @property
    def imports(self) -> set[str]:
        """Names of all that it imports, in functions too; of `from a import b`, both `a` and `a.b`."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return found

    @property
    def import_count_in_functions(self) -> int:
        """Import statements within functions."""
        statements = {
            inner
            for node in ast.walk(self.tree)
            if isinstance(node, FUNCTIONS)
            for inner in ast.walk(node)
            if isinstance(inner, (ast.Import, ast.ImportFrom))
        }
        return len(statements)

    @property
    def class_names(self) -> set[str]:
        """Names of the public classes at its top level."""
        names = {node.name for node in self.tree.body if isinstance(node, ast.ClassDef)}
        return {name for name in names if not name.startswith("_")}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout that is counted")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = count(options.root)
    if options.json:
        sys.stdout.write(f"{json.dumps(found, indent=2)}\n")
        return
    for name, value in found.items():
        sys.stdout.write(f"{name:<54}{value:>10,}\n")


def count(root: Path) -> dict[str, int | float]:
    """Each figure of the house by its name."""
    modules = list(_modules(root))
    importers = _importers(modules)
    homes = Counter(name for module in modules for name in module.class_names)
    docs = [path.read_text() for path in sorted((root / "docs").rglob("*.md"))]
    code_line_count = sum(module.code_line_count for module in modules)
    return {
        "product modules": len(modules),
        "product lines": sum(len(module.lines) for module in modules),
        "product code lines": code_line_count,
        "one-importer modules": sum(len(importers[module.name]) == 1 for module in modules),
        f"one-importer modules <= {SMALL_LINES} lines": sum(
            len(importers[module.name]) == 1 and len(module.lines) <= SMALL_LINES for module in modules
        ),
        "shared class names": sum(number > 1 for number in homes.values()),
        f"lines > {COLUMNS} columns (E501)": sum(
            len(_DIRECTIVE.sub("", line)) > COLUMNS for module in modules for line in module.lines
        ),
        f"lines > {COLUMNS} columns, with tests and scripts": sum(
            len(_DIRECTIVE.sub("", line)) > COLUMNS for text in _sources(root) for line in text.splitlines()
        ),
        "fmt: skip": sum("# fmt: skip" in line for module in modules for line in module.lines),
        "imports in functions": sum(module.import_count_in_functions for module in modules),
        "comments per 100 code lines": round(
            100 * sum(module.comment_count for module in modules) / code_line_count, 1
        ),
        "docstring lines that explain, per 100 code lines": round(
            100 * sum(module.explaining_line_count for module in modules) / code_line_count, 1
        ),
        "docstring lines that explain, of 100 docstring lines": round(
            100
            * sum(module.explaining_line_count for module in modules)
            / sum(len(text.strip().splitlines()) for module in modules for text in module.docstrings),
            1,
        ),
        "loose root modules": len(list((root / "ctxcache").glob("*.py"))),
        "docs words": sum(len(text.split()) for text in docs),
        "docs words, tables' pipes apart": sum(
            re.search(r"\w", word) is not None for text in docs for word in text.split()
        ),
        "README words": len((root / "README.md").read_text().split()),
    }


def _explaining_lines(text: str) -> int:
    lines = text.strip().splitlines()
    found = {number for number, line in enumerate(lines) if PICTURE.search(line)}
    begin = 0
    whole = "\n".join(lines)
    for number, end in enumerate(re.finditer(r"[.:;](?=\s|$)|\n\s*\n", whole + "\n")):
        sentence = whole[begin : end.end()]
        if number and EXPLAINING.search(sentence):
            first = whole.count("\n", 0, begin + len(sentence) - len(sentence.lstrip()))
            found |= set(range(first, first + sentence.strip().count("\n") + 1))
        begin = end.end()
    return len(found)


def _modules(root: Path) -> Iterator[Module]:
    for path in _files(root, *PRODUCT):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        yield Module(name.removesuffix(".__init__"), path.read_text())


def _sources(root: Path) -> Iterator[str]:
    return (path.read_text() for path in _files(root, *PRODUCT, *OTHERS))


def _files(root: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if GENERATED not in path.relative_to(root).parts:
                yield path


def _importers(modules: list[Module]) -> dict[str, set[str]]:
    """By module, the modules of the product that import it."""
    known = {module.name for module in modules}
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for target in module.imports:
            name = target if target in known else target.rpartition(".")[0]
            if name in known and name != module.name:
                found[name].add(module.name)
    return found


if __name__ == "__main__":
    main()

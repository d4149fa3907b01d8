#!/usr/bin/env python3
"""Check who imports whom against `import_law.toml`, and that no imports run in a circle.

Reads sources, imports nothing of them. An import in a function counts like any other.
"""

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ctxcache", "gpu_worker", "lab")

Law = dict[str, dict[str, list[str]]]


def main() -> None:
    """Print each violation and exit 1, or print how many modules obey."""
    law: Law = tomllib.loads((ROOT / "scripts" / "import_law.toml").read_text())
    imports = _imports()
    violations = [line for module in sorted(imports) for line in _violations(law, module, imports[module])]
    violations += _circles(imports)
    violations += _ambiguous_helpers()
    if violations:
        sys.exit("\n".join(["import law broken:", *violations]))
    sys.stdout.write(f"import law: {len(imports)} modules obey\n")


def _violations(law: Law, module: str, targets: set[str]) -> Iterator[str]:
    rules = sorted((name for name in law if _is_within(module, name)), key=len)
    allowed = next((law[name]["only"] for name in reversed(rules) if "only" in law[name]), None)
    spared = {name for rule in rules for name in law[rule].get("may", ())}
    banned = {name for rule in rules for name in law[rule].get("never", ())} - spared
    rooms = [f"{rule}.{room}" for rule in rules for room in law[rule].get("order", ())]
    own = next((level for level, room in enumerate(rooms) if _is_within(module, room)), None)
    above = [] if own is None else rooms[own + 1 :]
    if rooms and own is None and module not in rules:
        yield f"  {module} stands in no room"
    for target in sorted(targets):
        is_ours = target.partition(".")[0] in PACKAGES
        if any(_is_within(target, name) for name in banned):
            yield f"  {module} must never import {target}"
        elif any(_is_within(target, room) for room in above):
            yield f"  {module} may not import {target}, whose room is above its own"
        elif allowed is not None and is_ours and not any(_is_within(target, name) for name in allowed):
            yield f"  {module} may not import {target}; only: {', '.join(allowed) or 'nothing of ours'}"


def _circles(imports: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter({module: targets & set(imports) for module, targets in imports.items()}).prepare()
    except CycleError as error:
        return [f"  circle: {' -> '.join(error.args[1])}"]
    return []


def _ambiguous_helpers() -> Iterator[str]:
    """Imports of a test helper by a bare name that several files have: the path decides which it is."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    count_by_name = Counter(path.stem for path in tests)
    for path in tests:
        for name in sorted({target.partition(".")[0] for target in _targets(path)}):
            if count_by_name[name] > 1:
                yield f"  {path.relative_to(ROOT)}: {count_by_name[name]} files of tests are {name}.py"


def _imports() -> dict[str, set[str]]:
    """Map each module to what it imports; a name imported from a package is the module, if it is one."""
    files = {_module_name(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    return {
        module: {_nearest_module(target, set(files)) for target in _targets(path)} - {module}
        for module, path in files.items()
        if "_pb2" not in module
    }


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _targets(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _nearest_module(target: str, modules: set[str]) -> str:
    """Cut a class or function name off the module that holds it."""
    parent = target.rpartition(".")[0]
    return parent if target not in modules and parent in modules else target


def _is_within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


if __name__ == "__main__":
    main()

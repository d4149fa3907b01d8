"""The commands and settings of docs/coming_from.md, for tests that give them to the engines themselves."""

import shlex
from typing import Any

import yaml

from tests.documents import ROOT, blocks

PAGE = ROOT / "docs" / "coming_from.md"
DEFAULT_TARGET = "127.0.0.1:7420"


def commands(program: str) -> list[list[str]]:
    """The words of each command of the page that begins with this text, without it."""
    return [
        shlex.split(line.removeprefix(program))
        for block in blocks(PAGE, "sh")
        for line in block.splitlines()
        if line.startswith(program)
    ]


def settings(number: int) -> dict[str, Any]:
    """A file of settings that the page shows."""
    read: dict[str, Any] = yaml.safe_load(blocks(PAGE, "yaml")[number])
    return read

"""The block of Python in docs/engines.md: pasted as it stands, it holds a conversation.

README's is in tests/newcomer.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
from documents import DOCUMENTS, ROOT, aimed_at, blocks
from server_process import ServerProcess
from tiny_models import build

from gpu_worker.planning.plan import Method, RestorePlan


class Tokenizer:
    """Stands in for a tokenizer: a token per letter."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return [ord(letter) % 60 + 3 for letter in text]

    def get_vocab(self) -> dict[str, int]:
        """Its letters, which a model's description digests."""
        return {chr(code): code % 60 + 3 for code in range(32, 127)}

    def decode(self, token_ids: list[int]) -> str:
        """A text of token ids."""
        return " ".join(map(str, token_ids))


def test_the_block_runs_and_its_second_turn_restores(server: ServerProcess) -> None:
    """The first turn computes everything, the second finds what the first has saved."""
    model = build("llama")
    names: dict[str, Any] = {
        "model": model,
        "tokenizer": Tokenizer(),
        "plan": RestorePlan.uniform(Method.KV, model.config.num_hidden_layers),
        "new_ids": list(range(5, 75)),
    }
    source = aimed_at(blocks(ROOT / "docs" / "engines.md", "python")[0], server.target)
    code = compile(source.replace('"alice"', '"documented"'), "docs/engines.md", "exec")

    exec(code, names)  # noqa: S102  the project's own document
    first = names["turn"]
    exec(code, names)  # noqa: S102

    assert first.reused_token_count == 0
    assert names["turn"].reused_token_count > 0
    assert names["turn"].miss_reason == ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_import_of_a_block_is_there(document: Path) -> None:
    """Also in blocks that need more than a test has to run."""
    for block in blocks(document, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
            elif isinstance(node, ast.Import):
                assert [importlib.import_module(alias.name) for alias in node.names]

"""README's Python, pasted block behind block: the store alone, then an engine, on one store and again."""

import re
from pathlib import Path

from byte_tokenizer import save_llama
from documents import ROOT, aimed_at, blocks, printed
from server_process import ServerProcess

BLOCKS = blocks(ROOT / "README.md", "python")
TOLD = re.compile(r"^(\d+) tokens restored, (\d+) computed$", re.MULTILINE)


def test_the_second_run_restores_what_the_first_computed(tmp_path: Path) -> None:
    """As README says, and prints how much."""
    # Where README's name of a model is looked for first: the working directory.
    [name] = re.findall(r'^source = "(.*)"$', BLOCKS[1], re.MULTILINE)
    save_llama(tmp_path / name)
    with ServerProcess(tmp_path / "data") as server:
        source = aimed_at("\n".join(BLOCKS), server.target)
        first, again = (printed(source, tmp_path, timeout_s=240, HF_HUB_OFFLINE="1") for _ in range(2))

    asked, replied = len("Hello!"), 32
    assert TOLD.findall(first) == [("0", str(asked))]
    assert TOLD.findall(again) == [(str(asked + replied), str(asked))]
    assert [said.partition(" ")[0] for said in (first, again)] == ["100", "200"]

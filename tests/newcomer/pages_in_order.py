"""Every page's commands, in order, literally: from the wheel, in a network namespace that has loopback alone.

`make newcomer` runs it. Each page has a shell and a directory of its own, with what the page says is there
before. What a page says that a command prints is printed. Blocks that are not run are listed here, with the
reason; each other block of a page runs, and a page that is new is run or is listed.
"""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from documents import ROOT
from newcomers_home import typed

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(sh|console|python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ALONE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A namespace whose processes end with the shell, so that no store outlives its page."""
SIZES = {"CTXCACHE_ARENA_SIZE_BYTES": "64MiB", "CTXCACHE_SSD_SIZE_BYTES": "256MiB"}
"""What a store takes that is told no sizes: by itself it takes an eighth of the machine."""
TOOLS = ("helm", "buf")
"""What a page asks for beside the system's own, of this test's environment."""
ENGINE = "needs vLLM, SGLang or LMCache: `make engines`"
TORCH = "needs torch, and a model: tests/newcomer/test_readme_turns.py, tests/gpu_worker"
CLUSTER = "needs a cluster or an image: `make chart`, tests/helm"
INSTALLS = "installs: fresh_environments.py"
OTHER_HOST = "needs another host, or ssh"
# A page, the beginning of a block, and why it is not run; an empty beginning is the whole page.
NOT_RUN = {
    ("README.md", "python3 -m venv"): INSTALLS,
    ("README.md", "make demo"): "a model is downloaded: `make demo`, `make test`",
    ("README.md", "import ctxcache\nfrom transformers"): TORCH,
    ("docs/backup.md", "$ ctxcache export chat-17"): OTHER_HOST,
    ("docs/coming_from.md", "pip install"): f"{INSTALLS}; and a store of 500 GiB",
    ("docs/coming_from.md", "# before\nlmcache"): ENGINE,
    ("docs/coming_from.md", "# before\nvllm"): ENGINE,
    ("docs/coming_from.md", "# before\npython"): ENGINE,
    ("docs/disaggregation.md", ""): ENGINE,
    ("docs/edits.md", ""): TORCH,
    ("docs/engines.md", ""): TORCH,
    ("docs/fleet.md", "$ kubectl"): CLUSTER,
    ("docs/llamacpp.md", ""): "needs llama.cpp, and a model: `make engines-llamacpp`",
    ("docs/lmcache.md", ""): ENGINE,
    ("docs/operations.md", "$ ctxcache serve\n"): "runs until Ctrl-C, and says this machine's sizes",
    ("docs/operations.md", "$ docker"): CLUSTER,
    ("docs/operations.md", "$ sysctl"): "takes 8 GiB of the machine's memory, as root",
    ("docs/recording.md", ""): "records for an hour: tests/cli/test_trace_commands.py",
    ("docs/reinforcement_learning.md", "llm.reset"): ENGINE,
    ("docs/reinforcement_learning.md", "from ctxcache.client import Client\nfrom ctxcache.engines"): TORCH,
    ("docs/sglang.md", ""): ENGINE,
    ("docs/sidecar.md", ""): TORCH,
    ("docs/tutorials/fleet.md", "$ pip"): INSTALLS,
    ("docs/tutorials/operator.md", "$ python3 -m venv"): INSTALLS,
    ("docs/vllm.md", ""): ENGINE,
    ("docs/vllm_kubernetes.md", ""): CLUSTER,
    ("docs/worker.md", ""): TORCH,
}
SERVE = """
ctxcache serve > serve.log 2>&1 &
until ctxcache health > /dev/null 2>&1; do kill -0 $!; sleep 0.2; done
"""
STORE = """
cat > before.py <<'PY'
import numpy as np
import ctxcache
from ctxcache.client import OPAQUE, TOKENS, ModelSpec
from ctxcache.format.model import with_version

with ctxcache.connect() as cache:
    model = cache.models.register(ModelSpec.opaque("small", row_bytes=1024))
    cache.models.register(with_version(ModelSpec.opaque("policy", row_bytes=1024), "run-7-step-100"))
    for name in ("x", "chat-17"):
        session = cache.sessions.create(model, id=name)
        session.append({TOKENS: np.arange(256, dtype=np.int32), OPAQUE: np.zeros((256, 1024), np.uint8)})
        session.flush()
PY
python before.py
"""
# What a page takes to be there when its first line is typed.
BEFORE = {
    "README.md": SERVE,
    "docs/backup.md": SERVE + STORE,
    "docs/clients.md": SERVE,
    "docs/coming_from.md": SERVE,
    "docs/commands.md": f"{SERVE}{STORE}ctxcache session evict chat-17 > evicted\n",
    "docs/hints.md": SERVE + STORE,
    "docs/operations.md": SERVE,
    "docs/prefixes.md": SERVE,
    "docs/python.md": SERVE,
    "docs/blocks.md": SERVE,
    "docs/reinforcement_learning.md": SERVE + STORE,
}


class Block(NamedTuple):
    """A block of a page, and what the page says that it prints."""

    kind: str
    text: str
    promised: str

    @property
    def lines(self) -> str:
        """Its lines as they are typed; of a dialogue those behind the prompt, and what continues them."""
        if self.kind == "python":
            return f"cat > page.py <<'PAGE'\n{self.text}PAGE\npython page.py\n"
        if self.kind == "sh":
            return self.text
        return "".join(re.findall(r"^\$ ((?:.*\\\n)*.*\n)", self.text, re.MULTILINE))


def name_of(page: Path) -> str:
    """A page as the tables above name it."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """The blocks that are typed, in order. Those of Python continue one another: they are one program."""
    found: list[Block] = []
    for kind, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if kind == "text":
            if found and found[-1].kind == "sh":
                found[-1] = found[-1]._replace(promised=text)
            continue
        said = "".join(re.findall(r"^(?!\$ |    -).+\n", text, re.MULTILINE)) if kind == "console" else ""
        found.append(Block(kind, text, said))
    return found


def reason(page: Path, block: Block) -> str:
    """Why a block is not run; empty for one that is."""
    reasons = [
        why
        for (name, begin), why in NOT_RUN.items()
        if name == name_of(page) and block.text.startswith(begin)
    ]
    return reasons[0] if reasons else ""


def run_blocks(page: Path) -> list[Block]:
    """The blocks that are run."""
    kept = [block for block in blocks_of(page) if not reason(page, block)]
    python = "".join(block.text for block in kept if block.kind == "python")
    first = next((i for i, block in enumerate(kept) if block.kind == "python"), 0)
    return [
        block._replace(text=python) if i == first and block.kind == "python" else block
        for i, block in enumerate(kept)
        if block.kind != "python" or i == first
    ]


def test_every_exclusion_is_of_a_block_that_is_there() -> None:
    """One that leads nowhere would hide a block that comes to its place."""
    for name, begin in NOT_RUN:
        blocks = blocks_of(ROOT / name)
        assert any(block.text.startswith(begin) for block in blocks), (name, begin)
    assert set(BEFORE) <= {name_of(page) for page in PAGES if run_blocks(page)}


@pytest.mark.parametrize("page", [page for page in PAGES if run_blocks(page)], ids=name_of)
def test_a_page_does_what_it_says(page: Path, clone: Path, home: Path, tmp_path: Path) -> None:
    """Line by line, in one shell."""
    tools, place = tmp_path / "tools", tmp_path / "place"
    for directory in (tools, place):
        directory.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool, path=str(Path(sys.prefix) / "bin")) or f"/no/{tool}")
    # Pages name files of a clone: the chart, rules of alerts.
    for name in ("helm", "observability"):
        (place / name).symlink_to(clone / name)
    blocks = run_blocks(page)
    script = "ip link set lo up\n. ~/ctxcache/bin/activate\n" + BEFORE.get(name_of(page), "")
    for i, block in enumerate(blocks):
        script += f"echo '--- block {i}'\n{block.lines}"
    said = typed(
        script,
        place,
        home,
        wrapper=ALONE,
        PATH=f"{os.environ['PATH']}:{tools}",
        XDG_STATE_HOME=str(tmp_path / "state"),
        **SIZES,
    )

    for i, block in enumerate(blocks):
        part = said.partition(f"--- block {i}\n")[2].partition(f"--- block {i + 1}\n")[0]
        for line in block.promised.splitlines():
            assert line.rstrip() in part, f"{block.lines}\nsaid {part!r}"

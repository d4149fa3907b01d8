"""Questions that people ask have answers: each under the heading that docs/questions.md names, and true."""

import os
import re
import subprocess
import sys
from pathlib import Path

from documents import ROOT, blocks, links

from ctxcache.observe.table import METRICS
from ctxcache.settings.knobs import KNOBS
from tests.nursery import without_settings

QUESTIONS = ROOT / "docs" / "questions.md"
SECURITY = ROOT / "docs" / "security.md"
CAPACITY = ROOT / "docs" / "capacity.md"
ROW = re.compile(r"^\| .+ \| (.+): \[(.+)\]\((\w+\.md)#.+\) \|$", re.MULTILINE)
TIMEOUT_S = 60
PORT = "127.0.0.1:7420"


def test_each_answer_is_under_the_heading_that_is_named() -> None:
    """By the page's own title and the heading's own words; links themselves are tested with all others."""
    rows = ROW.findall(QUESTIONS.read_text(encoding="utf-8"))

    assert len(rows) == 8
    for title, heading, name in rows:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n")
        assert re.search(rf"^##+ {re.escape(heading)}$", text, re.MULTILINE), heading
    linked = {link.anchor for link in links(QUESTIONS)}
    assert {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for _, heading, _ in rows} <= linked


def test_the_steps_that_secure_a_store_do(tmp_path: Path) -> None:
    """As somebody types them: who has no token, or the wrong one, hears which exit code the page names."""
    start, ask = blocks(SECURITY, "sh")
    [promised] = blocks(SECURITY, "text")
    ports = "--metrics-listen '' --arena-size-bytes 64MiB --ssd-size-bytes 64MiB"
    start = start.replace(f"--listen {PORT}", f"--listen 127.0.0.1:0 {ports} --output json > ready", 1)
    # The port is the kernel's to choose; the ready line names it.
    read = (
        "until test -s ready; do kill -0 $!; done\n"
        "export CTXCACHE_TARGET=$(grep -o '127.0.0.1:[0-9]*' ready | head -1)\nuntil ctxcache"
    )
    start = start.replace("until ctxcache", read, 1)
    begin = "set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", begin + start + ask],
        cwd=tmp_path,
        env=without_settings(os.environ) | {"PATH": search, "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("exit code", "TENANT"))]
    assert [line.split("  ")[0] for line in said] == promised.splitlines()
    assert "UNAUTHENTICATED" in done.stderr
    assert "PERMISSION_DENIED" in done.stderr


def test_the_page_about_money_names_metrics_and_settings_that_are_there() -> None:
    """Those under its heading, with the default that it tells."""
    text = CAPACITY.read_text(encoding="utf-8")
    [section] = re.findall(r"^## What a running store saves\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    names, options = set(re.findall(r"\bctxcache_\w+", section)), re.findall(r"--([\w-]+) \d", section)

    assert (len(names), len(options)) == (6, 2)
    assert names <= set(METRICS)
    assert {option.replace("-", "_") for option in options} <= set(KNOBS)
    assert KNOBS["prefill_tokens_per_s"].default == 7000

"""The demo's default, the real model, where its conversion is on disk: `make demo-proof`, two minutes of CPU.

`test_demo_command.py` runs the same command on a tiny model in each `make test`.
"""

import json
import os
import subprocess

import pytest
from server_process import COMMAND_LINE

from lab.demo.building import default_cache_dir
from tests.nursery import without_settings

_CACHE = default_cache_dir()


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (_CACHE / "smollm2-135m-instruct-fp32-1").is_dir(),
    reason="SmolLM2 is not on disk; the demo puts it there",
)
def test_smollm2_and_its_twin_say_the_same_from_restored_state() -> None:
    """A real model's conversation survives every drop of its state and two kills of the server."""
    environment = without_settings(os.environ) | {"XDG_CACHE_HOME": str(_CACHE.parents[1])}
    command = [*COMMAND_LINE, "demo", "--turns", "3", "--reply-tokens", "16", "--json"]

    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["identical"]
    assert [model["kv_head_count"] for model in document["models"]] == [3, 9]
    sizes = {(row["model"], row["method"]): row["bytes_per_token"] for row in document["methods"]}
    twin = "SmolLM2-135M-Instruct MHA twin"
    assert 2 * (sizes[twin, "hidden"] - 4) == sizes[twin, "kv"] - 4
    replies = {turn["turn"]: turn["reply"] for turn in document["turns"] if turn["model"] == twin}
    assert all(len(reply.split()) > 3 for reply in replies.values())

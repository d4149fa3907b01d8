"""`ctxcache simulate --blocks` as a user meets it."""

import json
from pathlib import Path

import pytest
from command_line import ctxcache
from typer.testing import CliRunner

from ctxcache.cli.exit_codes import ExitCode
from ctxcache.cli.main import app


def trace_of(path: Path, block_tokens: int) -> Path:
    """A conversation of two requests of three blocks, and a third request that shares two of them."""
    rows = [(0, [1, 2, 3]), (1000, [1, 2, 3]), (2000, [1, 2, 9])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(keys, (ms, 3 * block_tokens, 1, ids), strict=True))) for ms, ids in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("block_tokens", [16, 64, 512])
@pytest.mark.parametrize("policy", ["lru", "value"])
def test_blocks_of_any_size(tmp_path: Path, block_tokens: int, policy: str) -> None:
    """Five of nine blocks are found; another size than the trace's is refused with the line."""
    trace = trace_of(tmp_path / "trace.jsonl", block_tokens)
    said = ("simulate", str(trace), "--blocks", "--policies", policy, "--json", "--block-tokens")

    document = json.loads(ctxcache(*said, str(block_tokens)).stdout)
    refused = ctxcache(*said, str(3 * block_tokens))

    assert document["prompt_hit_rate"] == pytest.approx(5 / 9)
    assert refused.exit_code == ExitCode.INVALID_ARGUMENT
    assert f"3 blocks of {3 * block_tokens} for {3 * block_tokens} tokens" in refused.sentence


@pytest.mark.parametrize(
    "option",
    [("--slots", "2"), ("--timed",), ("--inclusive",), ("--context", "9"), ("--ttl", "1h"), ("--costs",)],
    ids=lambda option: option[0],
)
def test_what_blocks_do_not_know_is_refused(tmp_path: Path, option: tuple[str, ...]) -> None:
    """An option that would change nothing is named."""
    trace = trace_of(tmp_path / "trace.jsonl", 512)
    ran = CliRunner().invoke(app, ["simulate", str(trace), "--blocks", *option])

    assert ran.exit_code == ExitCode.USAGE
    assert option[0] in ran.stderr

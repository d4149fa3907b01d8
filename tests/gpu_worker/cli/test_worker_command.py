"""`ctxcache worker`: plans, layouts and profiles as a user meets them."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build
from typer import Typer
from typer.testing import CliRunner

from ctxcache.errors import InvalidArgument
from gpu_worker.cli.app import app

A100 = ("--hardware", "a100-40gb")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of this machine's is found by accident."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _run(*arguments: str) -> str:
    ran = CliRunner().invoke(app, arguments)
    if ran.exception is not None:
        raise ran.exception
    return ran.stdout


def _json(*arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_run(*arguments, "--json"))
    return document


def test_worker_is_a_command_of_ctxcache() -> None:
    """The distribution's entry point is the app of all worker commands."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["ctxcache.commands"]["worker"]

    assert isinstance(EntryPoint("worker", value, "ctxcache.commands").load(), Typer)


def test_planning_needs_no_torch() -> None:
    """Plans and layouts are for machines without a GPU, too."""
    code = "import sys, gpu_worker.cli.app; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plan_says_what_comes_back_how() -> None:
    """The summary has the compact form, the end, and what to make faster."""
    lines = _run("plan", "llama-2-13b", *A100).splitlines()

    assert lines[0] == "hidden:0-34, kv:35-39"
    assert "copy is busiest; no plan ends earlier" in lines[1]


def test_explain_gives_reasons_and_alternatives() -> None:
    """Every run of layers has times and a reason; the papers' ways stand beside with theirs."""
    shown = _run("plan", "llama-3-8b", *A100, "--new", "100", "--by-layer", "--explain")

    assert "llama-3-8b on a100-40gb (datasheet): 4,096 tokens of history, 100 new" in shown
    assert "grouped heads: 4,096 bytes a token of K/V, a hidden row is 2.0 times that" in shown
    for name in ("hcache", "naive hybrid", "hidden", "recompute", "read", "copy", "compute"):
        assert name in shown


def test_plan_as_json_has_every_layer() -> None:
    """One document: seconds, bytes and tokens, layer by layer, and what others would take."""
    document = _json("plan", "llama-2-7b", *A100, "--history", "1000", "--no-recompute")
    (piece,) = document["layers"][0]["pieces"]

    assert document["format"] == 1
    assert len(document["layers"]) == 32
    assert (piece["method"], piece["begin"], piece["end"], piece["bytes"]) == ("hidden", 0, 1000, 8_192_000)
    assert document["bound_s"] <= document["end_s"] <= min(document["others_s"].values())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("plan", "gpt-9", *A100), "'gpt-9' was not measured and is not one of llama-2-7b"),
        (("plan", "llama-2-7b", "--hardware", "abacus"), "'abacus' is not one of a100-40gb"),
        (
            ("plan", "llama-2-7b", *A100, "--hold", "hidden,frozen"),
            "'frozen' is not one of hidden, kv, latent",
        ),
        (("plan", "llama-2-7b", *A100, "--hold", "", "--no-recompute"), "not held and cannot be recomputed"),
        (("plan", "llama-2-7b", "--profile", "no-such.json"), "no-such.json is no file"),
        (("layout", "llama-2-7b", *A100, "--returns", "often"), "'often' is not a list such as 1024x3"),
        (("profile", ".", "--lengths", "0,5"), "'0,5' is not a list such as 1,64,256,1024"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], problem: str) -> None:
    """Names what is wrong, and what would be right."""
    with pytest.raises(InvalidArgument, match=problem):
        _run(*arguments)


def test_plan_without_a_profile_says_that_it_goes_by_the_datasheet() -> None:
    """A datasheet's figures cannot be taken for measured ones."""
    ran = CliRunner().invoke(app, ("plan", "smollm2-135m"))

    assert ran.stderr == "no profile of smollm2-135m on this machine; by datasheet: cpu\n"
    assert ran.exit_code == 0


def test_layout_says_what_to_save() -> None:
    """By layer and in bytes; the same as JSON."""
    arguments = ("layout", "llama-2-7b", *A100, "--returns", "1024x3,8192")

    assert _run(*arguments).startswith("save hidden:0-30,kv:31: 270,340 bytes a token, 1.94 times smaller")
    assert _json(*arguments)["layers"] == ["hidden"] * 31 + ["kv"]


def test_an_allowed_loss_is_planned_explained_and_saved() -> None:
    """By name or by bound; without one, packed rows that are held are passed over."""
    held = ("plan", "llama-2-13b", *A100, "--hold", "hidden,kv,hidden_int8")
    text = _run(*held, "--allow-loss", "hidden_int8", "--explain")

    assert "5,792 bytes a token, 0.28 of its K/V, at a loss of 1e-04 nats a token" in text
    assert "lossless" in text
    assert "hidden_int8" not in _run(*held, "--explain")
    assert _json(*held, "--allow-loss", "4e-4")["loss_nats"] == 1e-4
    layout = ("layout", "llama-2-13b", *A100, "--no-recompute", "--byte-price", "1")
    assert _run(*layout).startswith("save hidden:0-39: 409,604 bytes a token, 2.00 times smaller than K/V")
    assert _run(*layout, "--allow-loss", "4e-4").splitlines()[:2] == [
        "save hidden_int8:0-39: 231,684 bytes a token, 3.54 times smaller than K/V",
        "lossy: predictions diverge by 1e-04 nats a token at most",
    ]


def test_a_measured_model_is_planned_by_its_profile(tmp_path: Path) -> None:
    """`worker profile` keeps what `worker plan` finds by the model's name; --no-profile passes it over."""
    model = tmp_path / "tiny"
    build("llama").save_pretrained(model)
    path = Path(_run("profile", str(model), "--lengths", "8,32", "--repeats", "1").strip())

    by_profile = _json("plan", "tiny", "--history", "32")
    by_file = _json("plan", "whatever", "--profile", str(path), "--history", "32")

    assert path.parent == tmp_path / "ctxcache" / "profiles"
    assert by_profile["profile"]["is_measured"]
    assert by_profile["layers"] == by_file["layers"]
    with pytest.raises(InvalidArgument, match="'tiny' was not measured"):
        _run("plan", "tiny", "--no-profile")

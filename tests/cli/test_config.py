"""`ctxcache config`: the settings a server would have, and the reference of all of them."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from command_line import ctxcache

from ctxcache.cli.failures import ExitCode
from ctxcache.settings import knobs
from ctxcache.settings.config import Settings, load
from ctxcache.settings.knobs import KNOBS, Knob, KnobKind
from ctxcache.settings.knobs.reference import toml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_leses = 5\n", "max_leses: is not a setting; did you mean max_leases?"),
        ("dirty_limit = 0\n", "dirty_limit: has to be above 0"),
        ("dirty_watermark = 0.9\n", "0.75 is below dirty_watermark, 0.9"),
        ('placement_policy = "fast"\n', "placement_policy: is not 'lru'"),
        ('default_ttl_s = "30y"\n', "default_ttl_s: '30y' is not a time such as 90s, 15min, 2h or 7d"),
        ('default_ttl_s = "0s"\n', "default_ttl_s: 1 is the least"),
        ("= 5\n", "is not TOML"),
        ("max_sessions = " + 5000 * "9", "is not TOML"),
        ("max_sessions = " + 5000 * "[", "is not TOML"),
    ],
)  # fmt: skip
def test_what_serve_would_refuse_check_refuses(tmp_path: Path, text: str, said: str) -> None:
    """The same words and the exit code of a configuration error, without a server."""
    file = tmp_path / "ctxcache.toml"
    file.write_text(text)

    done = ctxcache("config", "check", "--config", str(file))

    assert done.exit_code == 11
    assert said in done.stderr


def test_check_doubts_what_is_seldom_meant() -> None:
    """A dangerous setting that is allowed is a warning, and no error."""
    odd = ("--tail-age-s", "0", "--insecure-listen", "true", "--fault-injection", "true")
    done = ctxcache("config", "check", *odd, "--output", "json")
    answer = json.loads(done.stdout)

    assert done.exit_code == 0
    assert answer["is_valid"]
    assert {warning.split()[0].rstrip(":") for warning in answer["warnings"]} == {
        "tail_age_s",
        "insecure_listen",
        "fault_injection",
    }


def test_show_says_where_each_setting_comes_from(tmp_path: Path) -> None:
    """Option over variable over file over default; --effective shows the defaults too."""
    file = tmp_path / "ctxcache.toml"
    file.write_text('max_leases = 7\nmax_sessions = 8\narena_size_bytes = "1GiB"\ntail_age_s = 9\n')
    environment = {"CTXCACHE_MAX_LEASES": "70", "CTXCACHE_TAIL_AGE_S": "90"}
    arguments = ("config", "show", "--config", str(file), "--tail-age-s", "900", "--output", "json")

    given = json.loads(ctxcache(*arguments, environment=environment).stdout)
    effective = json.loads(ctxcache(*arguments, "--effective", environment=environment).stdout)

    assert given == {
        "arena_size_bytes": {"value": 1 << 30, "source": "file"},
        "tail_age_s": {"value": 900, "source": "option"},
        "max_sessions": {"value": 8, "source": "file"},
        "max_leases": {"value": 70, "source": "environment"},
    }
    assert list(effective) == list(KNOBS)
    assert effective["listen"] == {"value": "127.0.0.1:7420", "source": "default"}


def test_the_reference_is_a_file_that_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line of it uncommented is TOML, each setting is there once, and each at its default."""
    monkeypatch.setenv("HOME", str(tmp_path))
    names = tuple(f"# {name} = " for name in KNOBS)
    lines = [line[2:] for line in toml().splitlines() if line.startswith((*names, "# ["))]
    settings = tomllib.loads("\n".join(lines))
    file = tmp_path / "ctxcache.toml"
    without_default = {name for name, knob in KNOBS.items() if knob.default is None}
    file.write_text("\n".join(line for line in lines if line.split(" ")[0] not in without_default))

    assert set(settings) == set(KNOBS)
    assert load({}, file=file) == load({}) == Settings()
    assert ctxcache("config", "reference").stdout == toml()


def test_a_knob_says_all_that_its_readers_need() -> None:
    """A meaning in one sentence, words where words are asked for, and no two of one name."""
    for knob in KNOBS.values():
        assert knob.help.endswith(".")
        assert knob.unit_text, knob.name
        assert bool(knob.choices) == (knob.kind is KnobKind.WORD)
        assert not knob.advice.endswith(".")


def test_a_variable_is_known_in_any_case() -> None:
    """As it is read: its source is told, and a name that is misspelt is refused."""
    shown = json.loads(
        ctxcache("config", "show", "--output", "json", environment={"ctxcache_max_leases": "70"}).stdout
    )
    refused = ctxcache("config", "show", environment={"ctxcache_max_leses": "70"})

    assert shown["max_leases"] == {"value": 70, "source": "environment"}
    assert refused.exit_code == ExitCode.CONFIGURATION
    assert "unknown name ctxcache_max_leses" in refused.stderr


def test_every_setting_is_read_by_the_server() -> None:
    """A setting that no module but those of settings names would be taken and change nothing."""
    package = Path(knobs.__file__).parents[2]
    others = [path for path in package.rglob("*.py") if "knobs" not in path.parts]
    text = "\n".join(path.read_text() for path in others)

    assert [knob.name for knob in KNOBS.values() if not re.search(rf"\.{knob.name}\b", text)] == []


TIMES = [knob for knob in KNOBS.values() if knob.kind is KnobKind.SECONDS]


@pytest.mark.parametrize("knob", TIMES, ids=lambda knob: knob.name)
def test_a_time_is_written_as_any_option_takes_it(knob: Knob, tmp_path: Path) -> None:
    """With its unit: in an option, a variable and the file alike."""
    names = {name for name in KNOBS if name.endswith("_s") and "_per_" not in name}
    assert {one.name for one in TIMES} == names
    text, seconds = ("1500ms", "1.5") if (knob.most or 90) < 90 else ("1min30s", "90")
    file = tmp_path / "ctxcache.toml"
    file.write_text(f'{knob.name} = "{text}"\n')
    for given in (
        ctxcache("config", "show", knob.option, text, "--output", "json"),
        ctxcache("config", "show", "--output", "json", environment={knob.variable: text}),
        ctxcache("config", "show", "--config", str(file), "--output", "json"),
    ):
        assert given.exit_code == 0, given.stderr
        assert seconds in given.stdout


OPTIONS = [
    ("session", "list", "--timeout"),
    ("session", "list", "--older-than"),
    ("session", "list", "--idle"),
    ("session", "create", "new", "--model", "m", "--ttl"),
    ("session", "list", "--watch", "--interval"),
    ("top", "--interval"),
    ("lease", "list", "--older-than"),
    ("trace", "record", "file", "--duration"),
    ("worker", "serve", "--store-timeout-s"),
    ("worker", "age", "model", "--every"),
    ("worker", "llamacpp", "model", "--ttl-s"),
]


@pytest.mark.parametrize("words", OPTIONS, ids=" ".join)
def test_every_option_that_is_a_time_says_how_one_is_written(words: tuple[str, ...]) -> None:
    """By the same sentence."""
    ended = ctxcache(*words, "30y")
    assert ended.exit_code == ExitCode.USAGE
    assert "'30y' is not a time such as 90s" in " ".join(ended.stderr.replace("│", " ").split())


def test_an_option_takes_a_time_with_its_unit() -> None:
    """The call is made, and nobody listens there."""
    ended = ctxcache("--target", "127.0.0.1:1", "--timeout", "500ms", "lease", "list", "--older-than", "2h")
    assert ended.exit_code == ExitCode.UNAVAILABLE

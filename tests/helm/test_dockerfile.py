"""The image's recipe, as far as it can be looked at without building it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from chart import ROOT

DOCKERFILE = ROOT / "Dockerfile"


def test_the_linter_has_nothing_to_say() -> None:
    """hadolint, every rule."""
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", DOCKERFILE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_nobody_is_root() -> None:
    """Every image that is handed out ends with the chart's user."""
    stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    final = [stage for stage in stages if re.search(r" AS (store|worker)$", stage, re.MULTILINE)]
    assert len(final) == 2
    for stage in final:
        assert re.findall(r"^USER (.+)$", stage, re.MULTILINE)[-1:] == ["10001:10001"]


def _stage(name: str) -> str:
    stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    (found,) = [stage for stage in stages if re.search(rf" AS {name}$", stage.splitlines()[0])]
    return found


def test_the_default_command_has_a_place_that_its_user_may_write() -> None:
    """Made for the user before VOLUME: a new volume takes owner and mode from the image."""
    store, base = _stage("store"), _stage("base")
    (place,) = re.findall(r"^VOLUME (\S+)$", store, re.MULTILINE)
    (directory,) = re.findall(r"CTXCACHE_DATA_DIRECTORY=(\S+)", store)

    assert Path(directory).is_relative_to(place)
    assert re.search(rf"install --directory --owner=10001 --group=10001 --mode=0700 .*{place}\b", base)


def test_libraries_cache_where_any_user_may_write() -> None:
    """A platform's own user has no home, and the root may be read-only."""
    assert re.search(r"^ENV .*\bHOME=/tmp\b", _stage("base"), re.MULTILINE)


def test_images_say_what_they_are_and_how_they_are() -> None:
    """OCI's labels, a health check, and a build that takes nobody's pip.conf into a layer."""
    text = DOCKERFILE.read_text()
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in text
    for stage in ("store", "worker"):
        assert "HEALTHCHECK" in _stage(stage)
    installs = re.findall(r"^RUN ((?:.*\\\n)*.*pip install.*)$", text, re.MULTILINE)
    assert len(installs) == 2
    assert all(one.startswith("--mount=type=secret,id=pip,") for one in installs)


def test_the_stores_image_can_be_one_of_a_fleet() -> None:
    """It has the client of object stores, which the chart's `store.fleet` needs."""
    assert 'pip install --no-cache-dir ".[fleet]"' in _stage("build")


def test_images_bring_bytecode() -> None:
    """Bytecode is kept in an image: without it each start and each health check compiles all modules."""
    assert "--no-compile" not in DOCKERFILE.read_text()


def test_the_version_is_the_projects() -> None:
    """In the label."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"ARG VERSION={version}\n" in DOCKERFILE.read_text()

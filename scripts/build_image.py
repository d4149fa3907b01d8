#!/usr/bin/env python3
"""Build the Dockerfile's images where no container engine runs, and unpack them for scripts/run_pod.py.

The Dockerfile is built as it is, by buildah without namespaces (`--isolation chroot`), over a base that
mmdebstrap makes of Debian's own packages in the place of docker.io's. It runs as root on Debian:

    apt-get install buildah mmdebstrap bubblewrap
    scripts/build_image.py store worker

Everything lands in .images: `store.json` is the image's configuration, `store/` its root file system. pip is
configured as for this user, by a secret of the build and by read-only mounts of the local directories that it
names.
"""

import argparse
import configparser
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / ".images"
BASE = "localhost/ctxcache-base:latest"
TARGETS = ("store", "worker")
PACKAGES = ("python3", "python3-venv", "ca-certificates")
STORAGE = (
    "--storage-driver=vfs",
    f"--root={IMAGES / 'storage'}",
    f"--runroot={IMAGES / 'run'}",
)
"""vfs needs neither overlay nor fuse."""


def main() -> None:
    """Build what is asked for; exits with 77 where the machine lacks what that takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="store, worker; none: both")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--new-base", action="store_true", help="make the base again")
    arguments = parser.parse_args()
    targets = arguments.targets or list(TARGETS)
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if missing := lacking():
        sys.stderr.write(f"NOTICE: NO IMAGE WAS BUILT: {missing}\n")
        sys.exit(77)
    IMAGES.mkdir(exist_ok=True)
    # One at a time: what a build that was interrupted left is removed at the end.
    lock = (IMAGES / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    if arguments.new_base or not _buildah("images", "--quiet", "--filter", f"reference={BASE}"):
        _make_base()
    for target in targets:
        _build(target, arguments.build_arg)
        _unpack(target)
    _buildah("rm", "--all")
    # Those that the new ones took the names of.
    _buildah("rmi", "--prune")


def lacking() -> str:
    """The tools that the machine lacks; empty where it has all."""
    programs = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    if programs:
        return f"{' and '.join(programs)} are not installed (apt-get install {' '.join(programs)})"
    return "" if os.geteuid() == 0 else "buildah needs root for `--isolation chroot`"


def image_of(target: str) -> str:
    """The image's name, as the chart's default values have it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return f"ctxcache:{version}" if target == "store" else f"ctxcache:{version}-{target}"


def _make_base() -> None:
    archive = IMAGES / "base.tar"
    # The name in the official image.
    python = 'ln -s /usr/bin/python3 "$1/usr/local/bin/python"'
    options = ["--variant=minbase", f"--include={','.join(PACKAGES)}", f"--customize-hook={python}"]
    subprocess.run(["mmdebstrap", *options, _suite(), archive], check=True)
    container = _buildah("from", "scratch")
    _buildah("add", container, str(archive), "/")
    _buildah("commit", "--rm", container, BASE)
    archive.unlink()


def _suite() -> str:
    """The suite of the Debian that runs here: its wheels fit its Python."""
    release = Path("/etc/os-release").read_text()
    found = re.search(r"^VERSION_CODENAME=(\w+)$", release, re.MULTILINE)
    return found[1] if found else "stable"


def _build(target: str, build_args: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        secret = Path(directory) / "pip.conf"
        secret.write_text(pip_configuration())
        revision = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        arguments = [f"PYTHON_IMAGE={BASE}", f"REVISION={revision.stdout.strip() or 'unknown'}", *build_args]
        command = [
            "buildah",
            *STORAGE,
            "build",
            "--isolation=chroot",
            "--format=docker",
            "--pull=never",
            f"--target={target}",
            f"--tag={image_of(target)}",
            f"--secret=id=pip,src={secret}",
            *(f"--build-arg={text}" for text in arguments),
            *(f"--volume={path}:{path}:ro" for path in local_paths(secret.read_text())),
            str(ROOT),
        ]
        subprocess.run(command, check=True)


def pip_configuration() -> str:
    """The configuration of pip on this machine, from files and variables, as one file."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    options: dict[str, str] = {}
    # Variables are said first, and win over files.
    for where, name, value in re.findall(r"^([^.]+)\.([^=]+)='(.*)'$", said, re.MULTILINE):
        if where in ("global", "install", ":env:"):
            options.setdefault(name, value)
    lines = "".join(f"{name} = {value}\n" for name, value in options.items())
    return f"[global]\n{lines}"


def local_paths(configuration: str) -> Iterator[str]:
    """The files and directories that a pip.conf names: the build sees them at the same place."""
    parser = configparser.RawConfigParser()
    parser.read_string(configuration)
    found = {
        word.removeprefix("file://")
        for value in parser["global"].values()
        for word in value.split()
        if word.startswith(("/", "file:///")) and Path(word.removeprefix("file://")).exists()
    }
    # An index beside its files names them relative to itself.
    parents = {str(Path(path).parent) if path.endswith("/simple") else path for path in found}
    yield from sorted(parents)


def _unpack(target: str) -> None:
    configuration = json.loads(_buildah("inspect", "--type=image", image_of(target)))["Docker"]["config"]
    container = _buildah("from", "--pull=never", image_of(target))
    place, begun, old = IMAGES / target, IMAGES / f"{target}.begun", IMAGES / f"{target}.old"
    for path in (begun, old):
        shutil.rmtree(path, ignore_errors=True)
    subprocess.run(["cp", "--archive", "--reflink=auto", _buildah("mount", container), begun], check=True)
    _buildah("rm", container)
    # At once: a pod that begins meanwhile has all of the one or of the other.
    if place.exists():
        place.rename(old)
    begun.rename(place)
    (IMAGES / f"{target}.json").write_text(json.dumps(configuration, indent=2) + "\n")
    shutil.rmtree(old, ignore_errors=True)
    sys.stdout.write(f"{image_of(target)}: {place}\n")


def _buildah(*arguments: str) -> str:
    done = subprocess.run(["buildah", *STORAGE, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()

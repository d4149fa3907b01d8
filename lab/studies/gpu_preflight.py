"""The requirements of lab/gpu.sh that this Python lacks, told within seconds.

And wheels of it, to be carried there.

    python -m lab.studies.gpu_preflight                  # on the GPU machine: exits with 1 if something lacks
    python -m lab.studies.gpu_preflight --download DIR   # where packages can be had: a folder to carry there

The requirements are read from pyproject.toml: the package, its server, its worker and Triton, and what runs
the kernels' tests. torch, Triton and transformers are the machine's own. kvikio is found by a probe.
"""

import importlib
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = ("cli", "server", "worker", "gpu")
TESTS = ("pytest", "pytest-xdist", "pytest-asyncio", "hypothesis")
OWN = frozenset({"torch", "triton", "transformers", "numpy", "safetensors"})
"""The machine's: built for its GPU and its driver, or as large."""
DIRECT = ("kvikio-cu13>=26.10,<27", "libkvikio-cu13>=26.10,<27", "rapids-logger>=0.3,<0.4")
"""Of `ctxcache[direct]`, without the CUDA libraries and CuPy that it asks for, which the machine has."""
MODULES = {
    "grpcio": "grpc",
    "protobuf": "google.protobuf",
    "googleapis-common-protos": "google.rpc.status_pb2",
    "grpcio-health-checking": "grpc_health.v1",
    "grpcio-reflection": "grpc_reflection.v1alpha",
    "pytest-xdist": "xdist",
    "pytest-asyncio": "pytest_asyncio",
}
"""The name by which a distribution is imported, where that is another one."""
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
LATE = ("torch", "transformers")
"""Imported last: they take seconds."""


def needed() -> list[Requirement]:
    """Every requirement, and the package itself, whose extras are not named."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *TESTS]
    for extra in EXTRAS:
        texts += project["optional-dependencies"][extra]
    own = Requirement(project["name"])
    return [own, *(found for found in map(Requirement, texts) if found.name != own.name)]


def problems(requirements: Sequence[Requirement]) -> Iterator[tuple[Requirement, str]]:
    """The requirements that are missing, too old or do not import, each with the reason.

    The cheap look comes first.
    """
    here = []
    for one in requirements:
        try:
            found = version(one.name)
        except PackageNotFoundError:
            yield one, "is not installed"
            continue
        if one.specifier.contains(found, prereleases=True):
            here.append(one)
        else:
            yield one, f"is {found}"
    for one in sorted(here, key=lambda one: one.name in LATE):
        module = MODULES.get(one.name, one.name.replace("-", "_"))
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  # whatever keeps it from being imported is what is asked for
            yield one, f"does not import: {type(error).__name__}: {error}"


def download(directory: Path, python_version: str) -> int:
    """Fetch the wheels of all that is not the machine's own, and of what they ask for; pip's exit status.

    This package's own is built: its version, and its commands, are looked up among what is installed.
    """
    own = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(directory), str(ROOT)]
    if status := subprocess.run(own, check=False).returncode:  # noqa: S603  # pip, with our words
        return status
    names = [str(one) for one in needed() if one.name not in OWN | {"ctxcache"}]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", *platforms]
    command += ["--python-version", python_version, "--implementation", "cp", "-d", str(directory)]
    for words in (names, ["--no-deps", *DIRECT]):
        if status := subprocess.run([*command, *words], check=False).returncode:  # noqa: S603  # as above
            return status
    return 0


def main(
    *,
    wheels: Annotated[
        Path | None, typer.Option("--download", help="Fetch wheels into this folder, and check nothing.")
    ] = None,
    python_version: Annotated[str, typer.Option(help="Of the machine that the wheels are for.")] = "3.12",
) -> None:
    """Say what lacks; exits with 1 where something does."""
    if wheels is not None:
        sys.exit(download(wheels, python_version))
    begun = time.monotonic()
    is_bad = False
    for one, why in problems(needed()):
        is_bad = True
        print(f"missing: {one}: {why}", flush=True)
    if is_bad:
        print("carry it: python -m lab.studies.gpu_preflight --download DIR, then WHEELS=DIR bash lab/gpu.sh")
        sys.exit(1)
    print(f"all {len(needed())} requirements are here, looked at in {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    typer.run(main)

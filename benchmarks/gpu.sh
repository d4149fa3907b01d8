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
# The store's server runs beside it: needs this package's own dependencies as well. About two minutes with a 7B's weights.
timeout 180 "$python" benchmarks/saving.py --shape llama-2-7b --batch 1,16 --history 512 --steps 32 --rounds 9 --json | tee "$out/$(date +%F)-saving.jsonl"

#!/usr/bin/env bash
# Everything that needs a GPU, within ten minutes: the kernels' tests and figures, a restore without a store, an engine beside the sidecar by CUDA IPC,
# decoding while it is saved, restores beside recomputation, and from the SSD tier's files. A step that fails or takes too long hides no other; one table at the end; the exit status is that of
# the first step that failed. Needs this package with torch, triton, transformers, pytest and hypothesis in the Python that runs it.
#
#   bash lab/gpu.sh [DIRECTORY]         # results go there, lab/results by default; PYTHON=...: which one
#   WHEELS=DIR bash lab/gpu.sh          # first installs these beside that Python: python -m lab.studies.gpu_preflight --download DIR
#   ONLY='kernels restore' bash lab/gpu.sh    # these steps alone
#   TINY=1 bash lab/gpu.sh /tmp/tiny    # the same steps on a CPU, in about a minute; the figures mean nothing
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-lab/results}
python=${PYTHON:-python3}
begin=$out/$(date +%F)
steps=$begin-steps.jsonl
first_failure=0
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
if [[ -n ${WHEELS:-} ]]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit
  export PYTHONPATH=$PYTHONPATH:$site
fi
names="tests sidecar kernels pipeline saving restore direct decoding"
for name in ${ONLY:-}; do
  if [[ " $names " != *" $name "* ]]; then
    echo "ONLY: there is no step $name: $names" >&2
    exit 2
  fi
done
"$python" -m lab.studies.gpu_preflight || exit
: > "$steps"

# NAME SECONDS COMMAND...: what it prints is kept as NAME; the server of a restore that is ended needs a moment to go.
step() {
  local name=$1 limit_s=$2 began_s=$SECONDS status
  shift 2
  if [[ -n ${ONLY:-} && " $ONLY " != *" $name "* ]]; then return; fi
  echo "== $name, at most $limit_s s" >&2
  timeout --kill-after=5 "$limit_s" "$@" | tee "$begin-$name.jsonl"
  status=$?
  echo "{\"what\": \"step\", \"step\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - began_s)), \"limit_s\": $limit_s}" >> "$steps"
  if ((status && !first_failure)); then first_failure=$status; fi
}

if [[ -n ${TINY:-} ]]; then
  export TRITON_INTERPRET=1
  tests=(tests/gpu_worker/kernels/test_quantization.py)
  sidecar=(tests/gpu_worker/sidecar/test_sidecar.py)
  kernels=(--tiny)
  pipeline=(--rounds 2 --restores 1)
  saving=(--shape tiny --batch 2 --history 8 --steps 2 --rounds 2 --replayed 3)
  restore=(--shapes tiny,tiny-opt --device cpu --history 96,160 --rounds 2)
  direct=(--shape tiny --tokens 200 --rounds 2)
  decoding=(--shapes tiny --history 96 --steps 3 --rounds 1)
else
  tests=(tests/gpu_worker/kernels)
  sidecar=(tests/gpu_worker/sidecar/test_sidecar.py tests/gpu_worker/sidecar/test_direct_sidecar.py)
  kernels=(--tokens 512,2048,16384 --rounds 7)
  pipeline=(--device cuda --way arena --rounds 5 --restores 4)
  # Eager steps, then a graph's: what of a step its hundred replays take to be saved, and whether rows are right.
  saving=(--shape llama-2-7b --batch 16 --history 512 --steps 16 --rounds 4 --replayed 100)
  # Eight layers of each: what is restored and computed grows with them, memory and time to fill it too.
  restore=(--shapes llama-2-7b,opt-30b,llama-3-8b,llama-2-13b,qwen2.5-7b --layers 8 --device cuda
    --history 2048,8192,16384,32768 --ssd-tokens 2048 --rounds 3 --budget-s 115)
  direct=(--shape llama-2-7b --layers 8 --tokens 2048 --device cuda --rounds 3)
  decoding=(--shapes llama-2-7b --layers 8 --device cuda --history 2048 --steps 8 --rounds 3)
fi
# A process for each core: two hundred kernels compiled one after the other take a quarter of an hour.
pytest=("$python" -m pytest -q -n auto -p no:cacheprovider -c /dev/null --rootdir . -o asyncio_mode=auto)
step tests 75 "${pytest[@]}" "${tests[@]}"
step sidecar 60 "${pytest[@]}" "${sidecar[@]}"
step kernels 35 "$python" -m lab.studies.kernels --json "${kernels[@]}"
step pipeline 35 env -u TRITON_INTERPRET "$python" -m lab.studies.pipeline_cost "${pipeline[@]}"
# The store's server runs beside these.
step saving 80 "$python" -m lab.studies.saving --json "${saving[@]}"
step restore 170 "$python" -m lab.studies.restore --json "${restore[@]}"
step direct 50 "$python" -m lab.studies.direct --json "${direct[@]}"
step decoding 35 "$python" -m lab.studies.decoding --json "${decoding[@]}"
for name in tests sidecar; do
  if [[ -e $begin-$name.jsonl ]]; then mv "$begin-$name.jsonl" "$begin-$name.txt"; fi
done
timeout 20 "$python" -m lab.studies.gpu_table "$steps" "$begin"-{kernels,pipeline,saving,restore,direct,decoding}.jsonl || first_failure=${first_failure/#0/$?}
exit "$first_failure"

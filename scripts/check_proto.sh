#!/usr/bin/env bash
# The wire contract: style, format, generated code, and no break of what was promised.
# The promise is the last release; before the first one, the last commit but one. A break that is
# meant, before the first release: ALLOW_PROTO_BREAK=1.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="$PWD/.venv/bin"

(cd proto && "$bin/buf" lint && "$bin/buf" format --diff --exit-code)
"$bin/python" scripts/generate_proto.py --check

against=$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2>/dev/null || echo HEAD~1)
if [ "${ALLOW_PROTO_BREAK:-}" = 1 ]; then
  echo "proto: not compared with $against, as ALLOW_PROTO_BREAK says"
  exit 0
fi
if ! git cat-file -e "$against:proto/buf.yaml" 2>/dev/null; then
  echo "proto: no earlier contract to compare with"
  exit 0
fi
promised=$(mktemp -d)
trap 'rm -rf "$promised"' EXIT
git archive "$against" proto | tar -x -C "$promised"
(cd proto && "$bin/buf" breaking --against "$promised/proto")
echo "proto: style, format and generated code are right, nothing breaks $against"

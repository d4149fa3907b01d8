#!/usr/bin/env bash
# Put Debian's promtool into .tools/, unpacked and not installed: no Prometheus is started. Needs apt and its
# lists. Best effort: without it the tests of alerts and panels are skipped, and say so.
set -euo pipefail
cd "$(dirname "$0")/.."
if command -v promtool >/dev/null || [ -x .tools/promtool ]; then exit 0; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { (cd "$work" && timeout 60 apt-get download prometheus >/dev/null 2>&1); }
if ! fetch; then
  timeout 60 apt-get update >/dev/null 2>&1 || true
  fetch || { echo 'NOTICE: promtool could not be fetched: alerts and panels will be SKIPPED' >&2; exit 0; }
fi
dpkg-deb --fsys-tarfile "$work"/prometheus_*.deb | tar -x -C "$work" ./usr/bin/promtool
mkdir -p .tools
mv "$work/usr/bin/promtool" .tools/promtool

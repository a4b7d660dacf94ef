#!/usr/bin/env bash
# Run the long tests, marked `long`. CI runs them after the suite.
set -euo pipefail
cd "$(dirname "$0")/.."
exec bash tools/test.sh -n 2 --dist loadfile --no-loadscope-reorder --durations 30 -m long

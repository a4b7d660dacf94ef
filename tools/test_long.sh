#!/usr/bin/env bash
# Run the long tests, marked `long`. CI runs them after the suite.
#
#     bash tools/test_long.sh           those of CI
#     bash tools/test_long.sh --all     also those marked `release`, of which CI has shorter forms
set -euo pipefail
cd "$(dirname "$0")/.."
marker="long and not release"
if [ "${1:-}" = --all ]; then
    shift
    marker=long
fi
exec bash tools/test.sh -n 2 --dist loadfile --no-loadscope-reorder --durations 30 -m "$marker" "$@"

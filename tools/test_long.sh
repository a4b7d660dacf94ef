#!/usr/bin/env bash
# The long forms of proofs that the suite gives in short. CI runs them after it.
set -euo pipefail
cd "$(dirname "$0")/.."
exec bash tools/test.sh -n 2 --dist loadfile --no-loadscope-reorder -m long

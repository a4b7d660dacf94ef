#!/usr/bin/env bash
# The whole test suite but the long forms (tools/test_long.sh). Arguments go to pytest:
#   bash tools/test.sh tests/config -k include
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/install.sh dev
export HF_HUB_OFFLINE=1
# two workers, each taking whole files, since fixtures are shared within a file; with arguments, what they say.
# Files come in the order of tests/conftest.py, the longest first, so that both workers end together.
[ $# -gt 0 ] || set -- -n 2 --dist loadfile --no-loadscope-reorder -m "not long"
exec .venv/bin/python -m pytest "$@"

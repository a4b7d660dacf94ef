#!/usr/bin/env bash
# The whole test suite but the long forms (tools/test_long.sh). Arguments go to pytest:
#
#     bash tools/test.sh tests/config -k include
#     bash tools/test.sh --fast                     what needs no process of its own and no torch, in two minutes
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/install.sh dev
export HF_HUB_OFFLINE=1
# two workers, each taking whole files, since fixtures are shared within a file; with arguments, what they say.
# Files come in the order of tests/conftest.py, the longest first, so that both workers end together.
two=(-n 2 --dist loadfile --no-loadscope-reorder)
if [ "${1:-}" = --fast ]; then
    slow=(deploy end_to_end faults golden multihost parity remote sharding train/start test_readme.py)
    shift
    set -- "${two[@]}" -m "not long and not end_to_end and not multi_device" "${slow[@]/#/--ignore=tests/}" "$@"
fi
[ $# -gt 0 ] || set -- "${two[@]}" -m "not long"
exec .venv/bin/python -m pytest "$@"

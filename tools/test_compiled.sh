#!/usr/bin/env bash
# Compile the steps of every model family for TPUs and GPUs, without such devices, and check the compiled programs.
#
#     bash tools/test_compiled.sh            the tests, in a separate environment (.venv-compiled: 7 GB)
#     bash tools/test_compiled.sh --long     the long tests: more families, shapes and variants, half an hour
#     bash tools/test_compiled.sh --all      the full product of families, devices and variants, as a table
#
# Other arguments are passed to pytest. No accelerator is required.
set -euo pipefail
cd "$(dirname "$0")/.."
export VENV=.venv-compiled CONSTRAINTS=tools/constraints-compiled.txt
bash tools/install.sh compiled
export HF_HUB_OFFLINE=1 TF_CPP_MIN_LOG_LEVEL=2
if [ "${1:-}" = "--all" ]; then
    shift
    exec "$VENV/bin/python" tools/bench/compiled.py --all "$@"
fi
marker="not long"
if [ "${1:-}" = "--long" ]; then
    shift
    marker=long
fi
run() { "$VENV/bin/python" -m pytest -o addopts="-q --strict-markers --import-mode=importlib -p no:cacheprovider" -m "$marker" "$@"; }
if [ $# -gt 0 ]; then
    run "$@"
    exit
fi
# Two processes, since the compilers use one core for a part of the time. Files that compile the same programs, which
# are compiled once in a process, stay together.
together=(tests/compiled/test_budgets.py tests/compiled/test_families.py)
printed=$(mktemp)
run "${together[@]}" > "$printed" 2>&1 &
first=$!
code=0
run tests/compiled "${together[@]/#/--ignore=}" || code=$?
wait "$first" || code=$?
cat "$printed"
rm "$printed"
exit "$code"

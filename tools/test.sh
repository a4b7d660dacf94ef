#!/usr/bin/env bash
# Run the test suite except the long tests (tools/test_long.sh). Arguments are passed to pytest:
#
#     bash tools/test.sh tests/config -k include
#     bash tools/test.sh --fast                     only tests that compile no models, start no processes and need no
#                                                   torch: two minutes
#
# VENV and EXTRA set another environment and what is installed in it (tools/check_matrix.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/install.sh "${EXTRA:-dev}"
export HF_HUB_OFFLINE=1
export PYTHONDONTWRITEBYTECODE= # test modules with pytest's assertions are compiled once: 8 s of each worker
# Three workers on two cores, since tests wait for processes, unless arguments are given. Each takes complete files,
# since fixtures are shared within a file. Files run in the order of tests/conftest.py, the longest first, so that all
# workers finish at about the same time.
workers=(-n 3 --dist loadfile --no-loadscope-reorder)
if [ "${1:-}" = --fast ]; then
    slow=(deploy end_to_end evaluation faults golden lora models multihost objectives parity plan preprocess remote)
    slow+=(generation hf/test_weight_files.py sharding tracking/test_jit_log.py train weights)
    slow+=(test_pictures.py test_readme.py transfer)
    shift
    set -- "${workers[@]}" -m "not long and not end_to_end and not multi_device" "${slow[@]/#/--ignore=tests/}" "$@"
fi
[ $# -gt 0 ] || set -- "${workers[@]}" -m "not long"
exec "${VENV:-.venv}/bin/python" -m pytest "$@"

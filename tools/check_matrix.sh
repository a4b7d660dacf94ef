#!/usr/bin/env bash
# Run the fast tests with other Python versions, and so with other versions of JAX (see tools/constraints.txt):
#
#     bash tools/check_matrix.sh [PYTHON ...]        default: python3.12 python3.13
#
# The full suite (tools/test.sh) runs with one Python. Tests that need torch are excluded here: its CPU build is not
# available for every Python version.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- python3.12 python3.13
for python in "$@"; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    export VENV=".venv-$version" PYTHON="$python"
    bash tools/install.sh
    "$VENV/bin/uv" pip install -q --python "$VENV/bin/python" -c tools/constraints.txt pytest
    echo "check_matrix: Python $version, jax $("$VENV/bin/python" -c 'import jax; print(jax.__version__)')"
    HF_HUB_OFFLINE=1 "$VENV/bin/python" -m pytest --ignore=tests/parity --ignore=tests/test_readme.py
done

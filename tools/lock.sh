#!/usr/bin/env bash
# Write tools/constraints.txt anew, for every supported Python at once: versions that fit pyproject.toml, those of before
# where they still do (with --upgrade the newest). Names, versions and Python markers only. Run it when a dependency
# changes, and commit the result.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/uv ] || bash tools/install.sh
cp tools/constraints.txt tools/constraints.new
.venv/bin/uv pip compile pyproject.toml --universal --python-version 3.11 --extra dev --quiet \
    --no-annotate --no-header --no-emit-package lmtrain --output-file tools/constraints.new "$@"
{
    echo "# Versions that were tested together; made by tools/lock.sh. Use as: pip install -c tools/constraints.txt -e ."
    # torch's CUDA packages are no concern of ours, and would stand in the way of jax's own (extras cuda12, cuda13)
    grep -v -E '^(-| *#|nvidia-|cuda-|triton)' tools/constraints.new
} > tools/constraints.txt
rm tools/constraints.new

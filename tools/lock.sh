#!/usr/bin/env bash
# Rewrite tools/constraints.txt for all supported Python versions: versions that satisfy pyproject.toml, unchanged where
# possible (with --upgrade the newest). Names, versions and Python markers only. Run it after a dependency changes, and
# commit the result.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/uv ] || bash tools/install.sh
cp tools/constraints.txt tools/constraints.new
.venv/bin/uv pip compile pyproject.toml --universal --python-version 3.11 --extra dev --quiet \
    --no-annotate --no-header --no-emit-package lmtrain --output-file tools/constraints.new "$@"
{
    echo "# Versions that were tested together; made by tools/lock.sh. Use as: pip install -c tools/constraints.txt -e ."
    # torch's CUDA packages are not needed, and would conflict with those of jax (extras cuda12, cuda13)
    grep -v -E '^(-| *#|nvidia-|cuda-|triton)' tools/constraints.new
} > tools/constraints.txt
rm tools/constraints.new

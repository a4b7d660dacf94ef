#!/usr/bin/env bash
# Run the test suite with other Python versions, and so with other versions of JAX (see tools/constraints.txt):
#
#     bash tools/check_matrix.sh [PYTHON ...]        default: python3.12 python3.13
#     bash tools/check_matrix.sh --newest [PYTHON]   the newest versions that pyproject.toml allows, in place of pins;
#                                                    as everywhere, deprecations are errors; default python3.13
#     bash tools/check_matrix.sh --gpus [PYTHON]     the compiled tests of GPUs, default python3.13: a separate
#                                                    environment of 7 GB, which CI does not have
#
# Tests that need torch, whose CPU build is not available for every Python version, or lm-eval are excluded here, and
# those of scripts for deployment, which do not depend on Python.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = "--gpus" ]; then
    export PYTHON="${2:-python3.13}" VENV=".venv-compiled-newest" HF_HUB_OFFLINE=1 TF_CPP_MIN_LOG_LEVEL=2
    bash tools/install.sh compiled
    echo "check_matrix: compiling for GPUs with jax $("$VENV/bin/python" -c 'import jax; print(jax.__version__)')"
    exec "$VENV/bin/python" -m pytest -o addopts="-q --strict-markers --import-mode=importlib -p no:cacheprovider" \
        -m "not long" tests/compiled -k gpu
fi
newest=
if [ "${1:-}" = "--newest" ]; then
    newest=yes
    shift
    [ $# -gt 0 ] || set -- python3.13
fi
[ $# -gt 0 ] || set -- python3.12 python3.13
excluded=(parity deploy end_to_end/test_{benchmarks,chat,continued,distillation,eight_bit,lora,moe,preferences}.py)
excluded+=(end_to_end/test_transfer.py commands/test_check_texts.py evaluation/benchmarks hf/test_weight_files.py)
excluded+=(objectives/test_distillation.py preprocess/test_token_sources.py weights/test_compare_export.py test_readme.py)
for python in "$@"; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    export VENV=".venv-$version${newest:+-newest}" PYTHON="$python" EXTRA=tests
    bash tools/install.sh "$EXTRA"
    if [ -n "$newest" ]; then
        "$VENV/bin/uv" pip install -q --upgrade --python "$VENV/bin/python" -e ".[$EXTRA]"
        echo "check_matrix: other versions than in tools/constraints.txt:"
        "$VENV/bin/uv" pip freeze --python "$VENV/bin/python" -q | grep -v -x -F -f <(sed 's/ *;.*//' tools/constraints.txt) || true
    fi
    echo "check_matrix: Python $version, jax $("$VENV/bin/python" -c 'import jax; print(jax.__version__)')"
    bash tools/test.sh -n 2 --dist loadfile --no-loadscope-reorder -m "not long" "${excluded[@]/#/--ignore=tests/}"
done

#!/usr/bin/env bash
# Load exports of every family and variant in transformers 4, and compare logits with ours:
#
#     bash tools/check_transformers4.sh [NAME ...]        names of tests/parity/variants.py; default: all
#
# The tests use transformers 5, our dependency; version 4 is installed in a separate environment,
# .venv-transformers4. TRANSFORMERS sets another version ("transformers==4.57.*"). Exits with 1 if logits differ by more
# than 1e-4, or if tensors are missing or left over.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/install.sh dev
wanted=${TRANSFORMERS:-"transformers>=4,<5"}
venv=.venv-transformers4
torch=$(grep '^torch==' tools/constraints.txt)

if [ "$(cat "$venv/.installed" 2> /dev/null)" != "$wanted $torch" ]; then
    [ -x "$venv/bin/python" ] || .venv/bin/python -m venv "$venv"
    links=()
    for place in ${PIP_FIND_LINKS:-}; do
        links+=(--find-links "$place")
    done
    echo "check_transformers4: $wanted into $venv" >&2
    .venv/bin/uv pip install -q --python "$venv/bin/python" "${links[@]}" "$wanted" "$torch" numpy
    echo "$wanted $torch" > "$venv/.installed"
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HF_HUB_OFFLINE=1 HF_MODULES_CACHE="$folder/modules"
.venv/bin/python tools/check_transformers4.py export "$folder/models" "$@"
"$venv/bin/python" tools/check_transformers4.py load "$folder/models"

#!/usr/bin/env bash
# Create or update .venv and install lmtrain in it, with the versions of tools/constraints.txt.
#
#     bash tools/install.sh [EXTRA ...]        for example: bash tools/install.sh dev
#
# Requires Python 3.11 or newer. PYTHON sets another interpreter, VENV another folder, CONSTRAINTS an additional
# constraints file. A second call without changes does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
extras=$(IFS=,; echo "$*")
versions=(-c tools/constraints.txt ${CONSTRAINTS:+-c "$CONSTRAINTS"})

find_python() {
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            echo "$name"
            return
        fi
    done
    echo "install: no Python 3.11 or newer found; set PYTHON to its path" >&2
    exit 2
}

stamp="$venv/.installed"
wanted=$(cat pyproject.toml tools/constraints.txt ${CONSTRAINTS:-} tools/install.sh | cksum)
for done in "$extras" dev; do # dev includes everything of a plain install
    if [ "$(cat "$stamp" 2> /dev/null)" = "$wanted extras:$done" ]; then
        exit 0
    fi
done

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    "$python" -m venv "$venv"
fi
target=".${extras:+[$extras]}"
echo "install: $target into $venv ($("$venv/bin/python" --version))" >&2

# uv takes seconds where pip takes minutes; pip is used if uv is not available.
links=()
for place in ${PIP_FIND_LINKS:-}; do
    links+=(--find-links "$place")
done
if ! { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c tools/constraints.txt uv \
    && "$venv/bin/uv" pip install -q --compile-bytecode --python "$venv/bin/python" ${links[@]+"${links[@]}"} "${versions[@]}" -e "$target"; }; then
    echo "install: uv failed, trying pip" >&2
    "$venv/bin/python" -m pip install -q --disable-pip-version-check "${versions[@]}" -e "$target"
fi
"$venv/bin/python" -m compileall -q lmtrain # otherwise every start compiles it if PYTHONDONTWRITEBYTECODE is set
echo "$wanted extras:$extras" > "$stamp"

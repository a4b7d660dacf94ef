#!/usr/bin/env bash
# Make .venv (or bring it up to date) and install lmtrain in it, with the versions of tools/constraints.txt.
#
#     bash tools/install.sh [EXTRA ...]        for example: bash tools/install.sh dev
#
# Needs Python 3.11 or newer. PYTHON names another interpreter, VENV another folder, CONSTRAINTS a further file of
# versions. A second call that finds nothing changed does nothing.
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
    echo "install: no Python 3.11 or newer found; set PYTHON to one" >&2
    exit 2
}

stamp="$venv/.installed"
wanted=$(cat pyproject.toml tools/constraints.txt ${CONSTRAINTS:-} tools/install.sh | cksum)
for done in "$extras" dev; do # dev holds all that a plain install has
    if [ "$(cat "$stamp" 2> /dev/null)" = "$wanted extras:$done" ]; then
        exit 0
    fi
done

if [ ! -x "$venv/bin/python" ]; then
    "$(find_python)" -m venv "$venv"
fi
target=".${extras:+[$extras]}"
echo "install: $target into $venv ($("$venv/bin/python" --version))" >&2

# uv installs in seconds what takes pip minutes; pip does it where uv cannot be had.
links=()
for place in ${PIP_FIND_LINKS:-}; do
    links+=(--find-links "$place")
done
if ! { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c tools/constraints.txt uv \
    && "$venv/bin/uv" pip install -q --compile-bytecode --python "$venv/bin/python" ${links[@]+"${links[@]}"} "${versions[@]}" -e "$target"; }; then
    echo "install: uv could not do it, trying pip" >&2
    "$venv/bin/python" -m pip install -q --disable-pip-version-check "${versions[@]}" -e "$target"
fi
"$venv/bin/python" -m compileall -q lmtrain # else every start compiles it where PYTHONDONTWRITEBYTECODE is set
echo "$wanted extras:$extras" > "$stamp"

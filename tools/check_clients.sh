#!/usr/bin/env bash
# Load exports of every family and variant in other programs, and compare their logits and ids of texts with ours:
#
#     bash tools/check_clients.sh CLIENT [NAME ...]       names of tests/parity/variants.py; default: all
#
# CLIENT is transformers4 (the tests use version 5, our dependency), mlx (mlx-lm, on the CPU), or llama.cpp, whose source
# comes with llama-cpp-python and is compiled, which takes ten minutes on two cores. Each is installed in an environment
# of its own, .venv-<client>; VERSION sets its version ("transformers==4.57.*"). Exits with 1 if something differs that
# check_clients.py does not list as a limit of the client, or if such a limit is gone.
set -euo pipefail
cd "$(dirname "$0")/.."
client=${1:?"usage: bash tools/check_clients.sh transformers4|mlx|llama.cpp [NAME ...]"}
shift
torch=$(grep '^torch==' tools/constraints.txt)
case $client in
    transformers4) wanted=("${VERSION:-transformers>=4,<5}" "$torch" numpy) ;;
    mlx) wanted=("${VERSION:-mlx-lm}" "mlx[cpu]") ;;
    llama.cpp) wanted=("${VERSION:-llama-cpp-python}" "transformers>=4,<5" "$torch" numpy sentencepiece protobuf) ;;
    *)
        echo "check_clients: $client: expected transformers4, mlx or llama.cpp" >&2
        exit 2
        ;;
esac
bash tools/install.sh dev

venv=.venv-$client
if [ "$(cat "$venv/.installed" 2> /dev/null)" != "${wanted[*]}" ]; then
    [ -x "$venv/bin/python" ] || .venv/bin/python -m venv "$venv"
    links=()
    for place in ${PIP_FIND_LINKS:-}; do
        links+=(--find-links "$place")
    done
    echo "check_clients: ${wanted[*]} into $venv" >&2
    packages=("${wanted[@]}")
    if [ "$client" = llama.cpp ]; then
        rm -rf "$venv/source"
        "$venv/bin/pip" download -q --no-deps --no-binary :all: -d "$venv/source" "${wanted[0]}"
        tar xf "$venv"/source/*.tar.gz -C "$venv/source" --strip-components 1
        packages[0]=$(ls "$venv"/source/*.tar.gz)
    fi
    .venv/bin/uv pip install -q --python "$venv/bin/python" "${links[@]}" "${packages[@]}"
    echo "${wanted[*]}" > "$venv/.installed"
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HF_HUB_OFFLINE=1 HF_MODULES_CACHE="$folder/modules"
.venv/bin/python tools/check_clients.py export "$folder" "$@"
"$venv/bin/python" tools/check_clients.py "$client" "$folder"

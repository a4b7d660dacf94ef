# shellcheck shell=bash
# Set up a worker: lmtrain in ~/lmtrain, from REPO at BRANCH or from the copy that was sent, installed into its .venv.
# spin-up and babysit run it on every worker; -s selects another script. It can be run again.
set -euo pipefail
mkdir -p ~/lmtrain
cd ~/lmtrain

if [ -n "${REPO:-}" ]; then
    git init -q
    git fetch -q --depth 1 "$REPO" "$BRANCH"
    git checkout -qf FETCH_HEAD
else
    rm -rf ~/.lmtrain-copy
    mkdir ~/.lmtrain-copy
    tar xzf ~/.lmtrain-copy.tar.gz -C ~/.lmtrain-copy
    for path in ~/.lmtrain-copy/* ~/.lmtrain-copy/.[!.]*; do
        [ -e "$path" ] || continue
        rm -rf "./${path##*/}"
        mv "$path" .
    done
    rm -rf ~/.lmtrain-copy ~/.lmtrain-copy.tar.gz
fi

# TPU images come with Python 3.10, lmtrain needs 3.11; uv installs one.
for PYTHON in python3 python3.13 python3.12 python3.11 ''; do
    "${PYTHON:-false}" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && break
done
if [ -z "$PYTHON" ]; then
    python3 -m pip install -q --user --disable-pip-version-check -c tools/constraints.txt uv
    python3 -m uv python install -q 3.12
    PYTHON=$(python3 -m uv python find 3.12)
fi
export PYTHON
bash tools/install.sh tpu

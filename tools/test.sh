#!/usr/bin/env bash
# The whole test suite. Arguments go to pytest: bash tools/test.sh tests/config -k include
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/install.sh dev
export HF_HUB_OFFLINE=1
# two workers, each taking whole files, since fixtures are shared within a file; with arguments, what they say
[ $# -gt 0 ] || set -- -n 2 --dist loadfile
exec .venv/bin/python -m pytest "$@"

#!/usr/bin/env bash
# Reproduce a result: install, download public data, train, evaluate, report, and compare with the expected loss.
#
#     bash tools/reproduce.sh NAME [--check] [--section.field VALUE ...]
#
# NAME is one of configs/recipes; --check does it at a small size, offline after the install. Works in reproduced/NAME;
# run it again to resume. Exits with 1 if the loss is not the expected one, 2 for a user error, 75 if stopped by a signal
# (run it again), 3 if lmtrain fails.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/install.sh
exec .venv/bin/python tools/reproduce.py "$@"

#!/usr/bin/env bash
# Run the long tests, marked `long`. CI runs them after the suite.
#
#     bash tools/test_long.sh           those of CI
#     bash tools/test_long.sh --all     also those marked `release`, of which CI has shorter forms
#
# Real servers of Slurm and SSH, and a browser, are downloaded (tools/install_servers.sh); LMTRAIN_SYSTEM_TESTS=0 leaves
# them out.
set -euo pipefail
cd "$(dirname "$0")/.."
marker="long and not release"
if [ "${1:-}" = --all ]; then
    shift
    marker=long
fi
leave_out=()
if [ "${LMTRAIN_SYSTEM_TESTS:-1}" = 0 ]; then
    leave_out=(--ignore=tests/slurm --ignore=tests/deploy/test_tpu_workers.py --ignore=tests/deploy/test_tpu_training.py)
    leave_out+=(--ignore=tests/generation/test_page.py)
    echo "test_long: LMTRAIN_SYSTEM_TESTS=0: no tests of Slurm, of workers behind an SSH server and of the chat page" >&2
else
    bash tools/install_servers.sh
fi
# three workers on two cores: many of these tests wait for servers, signals and time limits
exec bash tools/test.sh ${leave_out[@]+"${leave_out[@]}"} -n 3 --dist loadfile --no-loadscope-reorder --durations 30 -m "$marker" "$@"

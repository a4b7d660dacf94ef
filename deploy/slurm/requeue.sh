# shellcheck shell=bash
# Sourced by the batch scripts. lmtrain's exit codes: 0 is done, 2 is a mistake that a restart would repeat. After all
# others the same command resumes: 75 stopped by a signal after saving, or before there was anything to save; 1 or 134
# (SIGABRT, by JAX) another process was lost, or a crash, like other signals.

# run_or_requeue COMMAND ...: exits with its code, after requeueing the job if a restart can help. MAX_REQUEUES (20)
# ends a crash loop. Slurm counts every requeue of the job, also those after a node failure.
run_or_requeue() {
    local code=0 count=${SLURM_RESTART_COUNT:-0} limit=${MAX_REQUEUES:-20}
    if ! [[ $limit =~ ^[0-9]+$ ]]; then
        echo "job $SLURM_JOB_ID: MAX_REQUEUES: expected a number, got $limit" >&2
        exit 2
    fi
    "$@" || code=$?
    if [ "$code" -eq 138 ]; then # 128 + SIGUSR1, which came before Python could handle it
        code=75
    fi
    if [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then
        exit "$code"
    fi
    if [ "$count" -ge "$limit" ]; then
        echo "job $SLURM_JOB_ID: exit $code after $count requeues, MAX_REQUEUES is $limit: not requeued" >&2
        exit "$code"
    fi
    echo "job $SLURM_JOB_ID: exit $code, requeue $((count + 1)) of at most $limit" >&2
    scontrol requeue "$SLURM_JOB_ID"
    exit "$code"
}

# shellcheck shell=bash
# Runs on a worker. lib.sh sends this file and a call of one of its functions through the standard input of ssh, so that
# nothing of it is in a command line or a file; then that input stays open. When it closes (Ctrl-C, a crashed laptop, a
# broken connection) the command receives SIGTERM, as at a preemption, and has 300 seconds.

begin() {
    echo "lmtrain-tpu: begun" >&2
    mkdir -p ~/lmtrain/logs
    cd ~/lmtrain || exit 1
    PATH="$PWD/.venv/bin:$PATH"
}

find_command() {
    type -P "$1" > /dev/null && return
    echo "lmtrain-tpu: command not found on this worker: $1 (CMD is a program and its arguments; for a shell line: bash -c '...')" >&2
    exit 127
}

# The first SIGTERM makes lmtrain save, a second one ends it: only the process that removes this file may send one.
mark_running() { : > ~/.lmtrain-running-"${RUN_ID:-setup}"; }
may_stop() { rm ~/.lmtrain-running-"${RUN_ID:-setup}" 2> /dev/null; }

# Copies output to ssh. After a disconnect the rest is discarded, so that a command can still exit cleanly.
relay() {
    trap '' TERM PIPE
    cat
    cat > /dev/null
} 2> /dev/null

# Run the arguments as a command, and return its exit code.
in_foreground() {
    local code interrupted='' child watcher
    find_command "$1"
    # The system's SIGTERM at a preemption reaches every process; it is not passed on.
    trap 'interrupted=1' TERM
    exec 3<&0 < /dev/null
    mark_running
    setsid "$@" 3<&- > >(relay 3<&-) 2> >(relay 3<&- >&2) &
    child=$!
    (
        trap - TERM
        while read -r _; do :; done
        sleep 2 # at a preemption this process has exited by now
        may_stop && kill -TERM -- "-$child"
        for ((code = 0; code < 300; code++)); do
            sleep 1
            kill -0 -- "-$child" || exit
        done
        kill -KILL -- "-$child"
    ) <&3 > /dev/null 2>&1 &
    watcher=$!
    exec 3<&-
    wait "$child"
    code=$?
    while [ -n "$interrupted" ] && [ "$code" -eq 143 ]; do # possibly the wait was interrupted
        interrupted=''
        wait "$child"
        code=$?
        [ "$code" -ne 127 ] || code=143
    done
    kill "$watcher" 2> /dev/null
    return "$code"
}

# The processes of this run. RUN_ID must not be exported during the search, or the search finds itself.
find_running() {
    grep -lzxF "RUN_ID=$RUN_ID" /proc/[0-9]*/environ 2> /dev/null | xargs -r grep -lzxF "HOME=$HOME" 2> /dev/null | cut -d/ -f3
}

# in_foreground, after stopping the remaining processes of this run: a broken connection may have left them running.
in_place_of_the_last() {
    local second left
    export -n RUN_ID
    for ((second = 0; second <= 310; second++)); do
        left=$(find_running)
        [ -n "$left" ] || break
        # shellcheck disable=SC2086
        case $second in
            0)
                echo "lmtrain-tpu: stopping the remaining processes of $RUN_ID" >&2
                may_stop && kill -TERM $left 2> /dev/null ;;
            300) kill -KILL $left 2> /dev/null ;;
        esac
        sleep 1
    done
    export RUN_ID
    in_foreground "$@"
}

# unless_running FUNCTION WORDS: refuse to start a run twice on a worker.
unless_running() {
    local second left=''
    export -n RUN_ID
    for ((second = 0; second < 3; second++)); do # a run that is exiting may need a moment
        left=$(find_running)
        [ -n "$left" ] || break
        sleep 1
    done
    export RUN_ID
    if [ -n "$left" ]; then
        echo "lmtrain-tpu: $HOSTNAME: $RUN_ID is already running (process ${left%%$'\n'*}); the log of a launched run: tail -f logs/$RUN_ID.out. Stop it first (pkill lmtrain), or set another RUN_ID" >&2
        exit 1
    fi
    "$@"
}

# Run the arguments as a command that outlives this connection, with a log.
detached() {
    local log=~/lmtrain/logs/$RUN_ID.out
    find_command "$1"
    mark_running
    setsid nohup "$@" >> "$log" 2>&1 < /dev/null &
    echo "lmtrain-tpu: $HOSTNAME: process $!, log $log"
}

# set_up STAMP SCRIPT
set_up() {
    rm -f ~/.lmtrain-set-up
    printf '%s\n' "$2" > ~/.lmtrain-setup.sh
    in_foreground bash ~/.lmtrain-setup.sh && echo "$1" > ~/.lmtrain-set-up
}

set_up_once() {
    [ "$(cat ~/.lmtrain-set-up 2> /dev/null)" = "$1" ] || set_up "$@"
}

begin

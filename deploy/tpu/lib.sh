# shellcheck shell=bash
# Shared by spin-up, run, launch and babysit: flags, the VM's state from gcloud, scripts on all workers. Sourced.
#
# gcloud is called once per worker, not once with --worker=all: workers would share its standard input, which carries
# their script (secrets must not be in a command line), and it would return only one of their exit codes.

# shellcheck disable=SC2034 # the scripts read the variables set here

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=${0##*/}
SECRETS="WANDB_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN"
UNREACHED=69        # exit code: the script did not start on some worker
MOST_UNREACHED=10   # limit of such attempts in a row
STOP_SECONDS=330    # a command has 300 to exit after SIGTERM (worker.sh)
poll=${LMTRAIN_TPU_POLL:-10}
grace=${LMTRAIN_TPU_GRACE:-60}
hello=${LMTRAIN_TPU_HELLO:-60} # timeout in seconds of the script's first line
case $poll in 0*) tick=$poll ;; *) tick=1 ;; esac
patience=10         # number of retries of gcloud; -1: no limit
at_interrupt="exit" # action on Ctrl-C or SIGTERM while nothing runs on the workers
on_workers_now='' interrupted='' members=() seen=''

say() { echo "$program: $*" >&2; }

mistake() {
    say "$*"
    exit 2
}

still_there() { # printed whenever a script leaves a VM that it has seen or created, because it costs money
    local kind=tpu-vm
    [ -n "$seen" ] || return 0
    [ -z "${queued:-}" ] || kind="queued-resources"
    say "$name is not deleted and costs money; delete it with: gcloud compute tpus $kind delete $name --zone $zone${queued:+ --force}"
}

stopped() {
    still_there
    exit "$1"
}

help() { # the comment at the top of the script
    sed -n '2,/^$/s/^#\{1,\} \{0,1\}//p' "$0"
}

# ---------------------------------------------------------------------------------------------------------- flags

# parse "ALLOWED FLAGS" WORD...: sets name, zone, type, ..., and the words of CMD
parse() {
    local allowed=" $1 " flag value
    name='' zone='' type='' spot='' image='' setup='' branch='' repo='' subnetwork='' alpha='' queued='' keep='' retries=10
    cmd=()
    shift
    while [ $# -gt 0 ]; do
        case $1 in
            --) shift; cmd=("$@"); break ;;
            --*=*) flag=${1%%=*} value=${1#*=}; shift; set -- "$flag" "$value" "$@" ;;
        esac
        case $1 in
            -h | --help) help; exit 0 ;;
            -z) flag=--zone ;; -t) flag=--type ;; -p | --spot) flag=--preemptible ;; -i) flag=--image ;;
            -s) flag=--setup ;; -b) flag=--branch ;; -r) flag=--repo ;; -n) flag=--subnetwork ;;
            -*) flag=$1 ;;
            *)
                [ -z "$name" ] || mistake "unexpected argument $1 after the NAME $name (CMD comes after --)"
                name=$1
                shift
                continue ;;
        esac
        [[ $allowed == *" $flag "* ]] || mistake "unknown flag $1; --help lists the flags"
        case $flag in
            --preemptible) spot=1; shift; continue ;;
            --use-alpha) alpha=1; shift; continue ;;
            --queued) queued=1; shift; continue ;;
            --keep) keep=1; shift; continue ;;
        esac
        [ $# -ge 2 ] && [ -n "$2" ] && [ "$2" != -- ] || mistake "$1 needs a value"
        case $flag in
            --zone) zone=$2 ;; --type) type=$2 ;; --image) image=$2 ;; --setup) setup=$2 ;; --branch) branch=$2 ;;
            --repo) repo=$2 ;; --subnetwork) subnetwork=$2 ;; --retries) retries=$2 ;;
        esac
        shift 2
    done
    [[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || \
        mistake "NAME of the VM: expected lowercase letters, digits and -, as in: $program my-tpu -z us-east1-d ..."
    [ -n "$zone" ] || mistake "-z ZONE is missing, as in: -z us-east1-d"
    [[ $retries =~ ^(-1|[1-9][0-9]*)$ ]] || mistake "--retries: expected a number from 1, or -1 for no limit, got $retries"
    command -v gcloud > /dev/null || mistake "gcloud not found; install the Google Cloud CLI, then: gcloud auth login"
    work=$(mktemp -d)
    trap 'leave' EXIT
    trap 'caught 130' INT
    trap 'caught 143' TERM
}

caught() {
    interrupted=$((${interrupted:-0} + 1))
    [ -n "$on_workers_now" ] || "$at_interrupt" "$1"
}

parse_creation() { # the properties of a VM, for spin-up and babysit
    [ -n "$type" ] || mistake "-t TYPE is missing, as in: -t v3-32"
    setup=${setup:-$here/setup.sh}
    [ -f "$setup" ] || mistake "set-up script not found: $setup"
    if [ -z "$image" ]; then # Google's standard software version for this kind of TPU
        case $type in
            v5litepod-*) image=v2-alpha-tpuv5-lite ;;
            v5p-*) image=v2-alpha-tpuv5 ;;
            v6e-*) image=v2-alpha-tpuv6e ;;
            v2-* | v3-* | v4-*) image=tpu-ubuntu2204-base ;;
            *) mistake "unknown software version for $type; set it with -i IMAGE" ;;
        esac
    fi
    branch=${branch:-HEAD}
    if [ -z "$repo" ]; then
        git -C "$here" rev-parse --verify --quiet "$branch^{tree}" > /dev/null || \
            mistake "branch $branch not found in the checkout of $here; -r REPO clones it from a repository"
        [ -z "$(git -C "$here" status --porcelain --untracked-files=no 2> /dev/null)" ] || \
            say "workers get the committed files ($branch); this checkout has uncommitted changes"
    fi
}

parse_command() { # splits CMD into leading VAR=value words and the rest, and derives the run id
    local word
    assignments=()
    while [ ${#cmd[@]} -gt 0 ] && [[ ${cmd[0]} =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; do
        assignments+=("${cmd[0]}")
        cmd=("${cmd[@]:1}")
    done
    [ ${#cmd[@]} -gt 0 ] || mistake "CMD is missing; end with -- CMD, as in: -- lmtrain train gs://bucket/my.yaml"
    # Never random: the same command resumes the same run, also on another day and from another machine.
    run_id=${RUN_ID:-$name-$(printf '%08x' "$(identity | cksum | cut -d' ' -f1)")}
    for word in ${assignments[@]+"${assignments[@]}"}; do
        [[ $word != RUN_ID=* ]] || run_id=${word#*=}
    done
    [[ $run_id =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || mistake "RUN_ID=$run_id cannot be used in file names"
}

is_secret() { [[ " $SECRETS " == *" $1 "* || $1 == *_KEY || $1 == *_TOKEN || $1 == *SECRET* || $1 == *PASSWORD* ]]; }

identity() { # CMD without its secrets: a new key is not a new run
    local word
    for word in ${assignments[@]+"${assignments[@]}"}; do
        is_secret "${word%%=*}" || printf '%s\0' "$word"
    done
    printf '%s\0' "${cmd[@]}"
}

shown_command() {
    local word
    for word in ${assignments[@]+"${assignments[@]}"}; do
        if is_secret "${word%%=*}"; then printf '%s=... ' "${word%%=*}"; else printf '%q ' "$word"; fi
    done
    printf '%q ' "${cmd[@]}"
}

# ---------------------------------------------------------------------------------------------------------- gcloud

tpus() { gcloud ${alpha:+alpha} compute tpus "$@" --zone="$zone" --quiet; }

# asked WORD...: as tpus, with the error messages in $work/error. Exits if a retry cannot help.
asked() {
    local code=0
    tpus "$@" 2> "$work/error" || code=$?
    [ "$code" -ne 0 ] || return 0
    case $(cat "$work/error") in
        *NOT_FOUND*) return 1 ;;
        *PERMISSION_DENIED* | *"does not have permission"* | *INVALID_ARGUMENT* | *UNAUTHENTICATED* | \
            *"active account"* | *"property [project]"* | *"unrecognized arguments"* | *"Invalid value"*)
            cat "$work/error" >&2
            mistake "gcloud refused the request; a retry would fail in the same way" ;;
    esac
    return 1
}

says() { grep -q "$1" "$work/error"; }

print_error() { sed "s/^/$program: gcloud: /" "$work/error" >&2; }

# look: sets state (MISSING, or gcloud's) and workers. Failed requests are retried `patience` times.
look() {
    local answer tries=0
    while true; do
        state='' workers=0
        if answer=$(asked tpu-vm describe "$name" --format='value(state,networkEndpoints.len())'); then
            read -r state workers <<< "$answer" || true
            [ "$state" != READY ] || [ "${workers:-0}" -gt 0 ] || state=CREATING
        elif [ $? -eq 2 ]; then
            stopped 2 # the subshell printed the reason
        elif says NOT_FOUND; then
            state=MISSING
            [ -z "$queued" ] || look_in_queue
        fi
        if [ -n "$state" ]; then
            [ "$state" = MISSING ] && seen='' || seen=1
            return 0
        fi
        tries=$((tries + 1))
        say "gcloud returned no state of $name; retrying"
        print_error
        [ "$patience" -lt 0 ] || [ "$tries" -lt "$patience" ] || { say "gave up after $tries attempts"; stopped 1; }
        sleep "$poll"
    done
}

look_in_queue() { # a queued resource has the name of its VM
    local answer
    if answer=$(asked queued-resources describe "$name" --format='value(state.state)'); then
        state=${answer:+QUEUE_$answer}
    elif [ $? -eq 2 ]; then
        stopped 2
    else
        says NOT_FOUND || state=''
    fi
}

under_way() { # whether the state will change by waiting; FAILED, PREEMPTED, SUSPENDED, ... will not
    case $state in
        CREATING | STARTING | RESTARTING | REIMAGING | DELETING | STOPPING) ;;
        QUEUE_CREATING | QUEUE_ACCEPTED | QUEUE_WAITING_FOR_RESOURCES | QUEUE_PROVISIONING | QUEUE_ACTIVE) ;;
        QUEUE_DELETING | QUEUE_SUSPENDING) ;;
        *) return 1 ;;
    esac
}

# create: returns 1, with the reason printed, if there is no capacity now
create() {
    local words=(--accelerator-type="$type")
    [ -z "$subnetwork" ] || words+=(--subnetwork="$subnetwork")
    [ -z "$spot" ] || words+=(--spot)
    say "creating $name, a $type${spot:+, spot,} in $zone; this takes minutes"
    seen=1 # it may exist whatever the answer
    if [ -n "$queued" ]; then
        words=(queued-resources create "$name" --node-id="$name" --runtime-version="$image" "${words[@]}")
    else
        words=(tpu-vm create "$name" --version="$image" "${words[@]}")
    fi
    if ! asked "${words[@]}" > /dev/null; then
        ! says ALREADY_EXISTS || return 0
        print_error
        return 1
    fi
}

delete() {
    say "deleting $name"
    if [ -n "$queued" ] && asked queued-resources delete "$name" --force > /dev/null; then return 0; fi
    if [ -n "$queued" ] && ! says NOT_FOUND; then print_error; return 1; fi
    if asked tpu-vm delete "$name" > /dev/null || says NOT_FOUND; then return 0; fi
    print_error
    return 1
}

# ------------------------------------------------------------------------------------------- a script on all workers

# on_workers SCRIPT: sends it to each worker and waits. Sets code, one for all workers, and reached, whether it started
# on all. Running scripts are stopped by Ctrl-C or SIGTERM (sets interrupted), or `grace` seconds after one has failed.
on_workers() {
    local script number left failure failed_at='' stopped_at=''
    script="$(cat "$here/worker.sh")"$'\n'"$1"$'\n'"# the end"
    rm -f "$work"/*.*
    # While fd 9 is open the workers continue; it closes when this process dies in any way (worker.sh). No other process
    # may hold it.
    mkfifo "$work/line.open"
    # shellcheck disable=SC2094
    exec 9<> "$work/line.open" 8< "$work/line.open"
    members=() interrupted='' on_workers_now=1
    set -m # one process group each, which Ctrl-C in a terminal does not reach
    for ((number = 0; number < workers; number++)); do
        on_worker "$number" "$script" < /dev/null &
        members+=("$!")
    done
    set +m
    exec 8<&-
    while true; do
        count_ended # uses only the shell: Ctrl-C would stop other programs
        [ "$left" -gt 0 ] || break
        if [ -n "$stopped_at" ]; then
            [ "${interrupted:-0}" -lt 2 ] && [ $((SECONDS - stopped_at)) -lt "$STOP_SECONDS" ] || break
        elif [ -n "$interrupted" ] || { [ -n "$failed_at" ] && [ $((SECONDS - failed_at)) -ge "$grace" ]; }; then
            [ -n "$interrupted" ] || say "a worker failed $grace s ago"
            say "stopping $left worker(s) by SIGTERM, and waiting; Ctrl-C${interrupted:+ again} exits immediately"
            stopped_at=$SECONDS
            exec 9>&-
        elif [ -z "$failed_at" ] && [ -n "$failure" ]; then
            failed_at=$SECONDS
        fi
        sleep "$tick" || true
    done
    exec 9>&-
    end_members
    on_workers_now=''
    judge
}

count_ended() {
    local number one
    left=0 failure=''
    for ((number = 0; number < workers; number++)); do
        if [ ! -e "$work/code.$number" ]; then
            left=$((left + 1))
        else
            read -r one < "$work/code.$number"
            [ "$one" -eq 0 ] || failure=1
        fi
    done
}

on_worker() { # in a separate process
    local number=$1 code=0 feeder bytes
    exec 9>&-
    trap - INT TERM EXIT
    bytes=$(count "$2")
    mkfifo "$work/in.$number"
    {
        printf 'begin\n%s' "$2"
        exec cat <&8
    } > "$work/in.$number" 2> /dev/null &
    feeder=$!
    # gcloud reconnects when a connection breaks, but then the script was read already: no line arrives, hence 69.
    # A dead VM sends nothing: the timeout is two minutes. BatchMode, since nobody can answer prompts.
    {
        tpus tpu-vm ssh "$name" --worker="$number" \
            --ssh-flag="-oBatchMode=yes -oConnectTimeout=15 -oServerAliveInterval=30 -oServerAliveCountMax=4" \
            --command="bash -c 'read -rt $hello && script=\$(timeout 900 head -c $bytes); [[ \$script == *\"# the end\" ]] || exit $UNREACHED; eval \"\$script\"'" \
            < "$work/in.$number" 2>&1 >&3 3>&- 8<&- | errors "$number" >&2
    } 3>&1 8<&- | output "$number" || code=$?
    kill "$feeder" 2> /dev/null || true
    echo "$code" > "$work/new.$number"
    mv "$work/new.$number" "$work/code.$number"
}

count() { # bytes, not characters
    local LC_ALL=C
    echo ${#1}
}

output() { # prefixes the lines of several workers with their number
    if [ "$workers" -eq 1 ]; then exec cat; fi
    lines "[$1] "
}

errors() {
    local prefix=''
    [ "$workers" -eq 1 ] || prefix="[$1] "
    lines "$prefix" "$work/begun.$1"
}

lines() {
    local line
    while IFS= read -r line || [ -n "$line" ]; do
        if [ -n "${2:-}" ] && [ "$line" = "lmtrain-tpu: begun" ]; then : > "$2"; else printf '%s%s\n' "$1" "$line"; fi
    done
}

end_members() {
    local member
    for member in ${members[@]+"${members[@]}"}; do
        kill -TERM -- "-$member" 2> /dev/null || true
        wait "$member" 2> /dev/null || true
    done
    members=()
}

judge() { # one exit code for all workers: a mistake (2) before a failure before a clean stop (75) before success
    local number one
    code=0 reached=1
    for ((number = 0; number < workers; number++)); do
        one=255
        [ ! -e "$work/code.$number" ] || read -r one < "$work/code.$number"
        [ -e "$work/begun.$number" ] || { reached='' one=$UNREACHED; }
        if [ "$one" -ne 0 ] && [ "$code" -ne 2 ]; then
            if [ "$code" -eq 0 ] || [ "$code" -eq 75 ] || [ "$one" -eq 2 ]; then code=$one; fi
        fi
    done
}

# The script that runs CMD. It contains the secrets, and exists only in memory and in the ssh connection.
command_script() { # command_script FUNCTION..., a function of worker.sh with its arguments before CMD
    local word
    printf 'export RUN_ID=%q\n' "$run_id"
    for word in $SECRETS; do
        [ -z "${!word:-}" ] || printf 'export %s=%q\n' "$word" "${!word}"
    done
    for word in ${assignments[@]+"${assignments[@]}"}; do
        printf 'export %s=%q\n' "${word%%=*}" "${word#*=}"
    done
    printf '%s' "$*"
    printf ' %q' "${cmd[@]}"
}

# The script that sets up a worker, with a stamp: `set_up_once` does nothing on a worker that has this stamp.
setup_script() { # setup_script FUNCTION
    local tree=''
    if [ -z "$repo" ]; then
        tree=$(git -C "$here" rev-parse "$branch^{tree}")
        printf "base64 -d > ~/.lmtrain-copy.tar.gz <<'ARCHIVE'\n"
        (cd "$(git -C "$here" rev-parse --show-toplevel)" && git archive --format=tar.gz "$branch" | base64)
        printf 'ARCHIVE\n'
    fi
    printf 'export REPO=%q BRANCH=%q\n' "$repo" "$branch"
    printf '%s %q %q' "$1" "$(printf '%s\0' "$(cat "$setup")" "$repo" "$branch" "$tree" | cksum)" "$(cat "$setup")"
}

leave() {
    exec 9>&- || true
    end_members
    rm -rf "$work"
}

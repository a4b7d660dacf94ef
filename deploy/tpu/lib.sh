# shellcheck shell=bash
# Shared by spin-up and babysit: flags, the VM's state, files and commands for all its workers. Sourced.
# gcloud does the rest: it connects to all workers at once, and repeats a connection that fails.

# shellcheck disable=SC2034 # the scripts read the variables set here

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=${0##*/}
poll=${LMTRAIN_TPU_POLL:-10}   # seconds
grace=${LMTRAIN_TPU_GRACE:-60} # seconds
run_id='' exists=''
UNREACHED=69 # exit code

say() { echo "$program: $*" >&2; }

mistake() {
    say "$*"
    exit 2
}

# parse "ALLOWED FLAGS" WORD...: sets name, zone, type, ..., and the words of CMD
parse() {
    local allowed=" $1 " flag
    name='' zone='' type='' spot='' image='' setup=$here/setup.sh branch='' repo='' subnetwork='' alpha='' keep='' retries=10
    cmd=() variables=()
    shift
    while [ $# -gt 0 ]; do
        case $1 in
            --) shift; cmd=("$@"); break ;;
            --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        esac
        case $1 in
            -h | --help) sed -n '2,/^$/s/^#\{1,\} \{0,1\}//p' "$0"; exit 0 ;; # the comment at the top of the script
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
            --keep) keep=1; shift; continue ;;
        esac
        [ $# -ge 2 ] && [ -n "$2" ] && [ "$2" != -- ] || mistake "$1 needs a value"
        printf -v "${flag#--}" %s "$2"
        shift 2
    done
    [[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || \
        mistake "NAME of the VM: expected lowercase letters, digits and -, as in: $program my-tpu -z us-east1-d ..."
    [ -n "$zone" ] || mistake "-z ZONE is missing, as in: -z us-east1-d"
    [ -n "$type" ] || mistake "-t TYPE is missing, as in: -t v3-32"
    [[ $retries =~ ^(-1|[1-9][0-9]*)$ ]] || mistake "--retries: expected a number from 1, or -1 for no limit, got $retries"
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
        branch=$(git -C "$here" rev-parse "$branch^{commit}") # all workers get this commit, now and after preemptions
        [ -z "$(git -C "$here" status --porcelain --untracked-files=no 2> /dev/null)" ] || \
            say "workers get the committed files; this checkout has uncommitted changes"
    fi
    [[ ! $repo =~ ^https?://[^/]*@ ]] || \
        mistake "-r: command lines are visible to others, and this URL has a password or token; leave -r out, and this checkout is copied"
    command -v gcloud > /dev/null || mistake "gcloud not found; install the Google Cloud CLI, then: gcloud auth login"
    umask 077
    work=$(mktemp -d)
    trap leave EXIT
}

leave() {
    rm -rf "$work"
    [ -z "$exists" ] || say "$name is not deleted and costs money: gcloud compute tpus tpu-vm delete $name --zone $zone"
}

tpus() { gcloud ${alpha:+alpha} compute tpus tpu-vm "$@" --zone="$zone" --quiet; }

# asked WORD...: as tpus, with errors in $work/error. Exits with 2 if a retry cannot help.
asked() {
    mkdir -p "$work" # systems clean their folder of temporary files, and runs last for weeks
    tpus "$@" 2> "$work/error" && return
    if grep -qE "PERMISSION_DENIED|does not have permission|INVALID_ARGUMENT|UNAUTHENTICATED|active account|property \[project\]|unrecognized arguments|Invalid value" "$work/error"; then
        cat "$work/error" >&2
        mistake "gcloud refused the request; a retry would fail in the same way"
    fi
    return 1
}

error_has() { grep -qE "$1" "$work/error"; }

print_error() { sed "s/^/$program: gcloud: /" "$work/error" >&2 || true; }

# look: sets state (MISSING, or gcloud's) and workers. Failed requests are repeated.
look() {
    while ! asked describe "$name" --format='value(state,networkEndpoints.len())' > "$work/answer"; do
        if error_has NOT_FOUND; then
            echo MISSING > "$work/answer"
            break
        fi
        say "gcloud returned no state of $name; retrying"
        print_error
        sleep "$poll"
    done
    read -r state workers < "$work/answer" || true
    [ "$state" != READY ] || [ "${workers:-0}" -gt 0 ] || state=CREATING
    [ "$state" = MISSING ] && exists='' || exists=1
    case $state in # waiting is false for FAILED, PREEMPTED, SUSPENDED, ..., which do not end automatically
        CREATING | STARTING | RESTARTING | REIMAGING | DELETING | STOPPING) waiting=1 ;;
        *) waiting='' ;;
    esac
}

# create: returns 1, with the reason printed, if there is no capacity now
create() {
    say "creating $name, a $type${spot:+, spot,} in $zone; this takes minutes"
    exists=1 # it may exist whatever the answer
    asked create "$name" --accelerator-type="$type" --version="$image" ${subnetwork:+--subnetwork="$subnetwork"} \
        ${spot:+--spot} > /dev/null || error_has ALREADY_EXISTS || { print_error; return 1; }
}

# on_workers COMMAND [STOP]: run a shell command on all workers and print its output. Each worker ends with a line
# `lmtrain-tpu: WORKER: exit N`. Sets code, one for all: a mistake (2) before a failure before a clean stop (75) before
# success; 69 if a worker was not reached or its connection broke. When one has failed, the command STOP runs `grace`
# seconds later, for those that have not ended. The timeout of a dead VM, which sends nothing, is two minutes.
on_workers() {
    local line one ended=' ' count=0 stopper=''
    code=0
    while IFS= read -r line || [ -n "$line" ]; do
        if ! [[ $line =~ "lmtrain-tpu: "([^ ]+)": exit "([0-9]+)$ ]]; then
            printf '%s\n' "$line"
            continue
        fi
        [[ $ended != *" ${BASH_REMATCH[1]} "* ]] || continue
        ended+="${BASH_REMATCH[1]} " one=${BASH_REMATCH[2]} count=$((count + 1))
        if [ "$one" -ne 0 ] && [ "$code" -ne 2 ]; then
            if [ "$code" -eq 0 ] || [ "$code" -eq 75 ] || [ "$one" -eq 2 ]; then code=$one; fi
        fi
        if [ "$one" -ne 0 ] && [ -n "${2:-}" ] && [ -z "$stopper" ] && [ "$count" -lt "$workers" ]; then
            { sleep "$grace" > /dev/null 2>&1; say "a worker has failed: stopping the others"; on_all "$2" > /dev/null; } &
            stopper=$!
        fi
    done < <(on_all "$1")
    [ -z "$stopper" ] || kill "$stopper" 2> /dev/null || true
    [ "$count" -eq "$workers" ] || code=$UNREACHED
}

on_all() {
    tpus ssh "$name" --worker=all --command="$1" --ssh-flag="-oBatchMode=yes -oConnectTimeout=15" \
        --ssh-flag="-oServerAliveInterval=30 -oServerAliveCountMax=4" 2>&1 < /dev/null
}

# set_up [again]: send the variables of CMD, secrets and what a worker runs; then run the set-up, once on each VM for the
# same script and files, not under a run that is running. Command lines are visible to others, so variables are in a file
# that only this user can read, here and on the workers. Sets code.
set_up() {
    local tree='' stamp variable
    rm -rf "$work/files"
    mkdir -p "$work/files"
    for variable in WANDB_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN; do
        [ -z "${!variable:-}" ] || printf '%s=%q\n' "$variable" "${!variable}"
    done > "$work/files/.lmtrain-environment"
    for variable in ${variables[@]+"${variables[@]}"}; do
        printf '%s=%q\n' "${variable%%=*}" "${variable#*=}"
    done >> "$work/files/.lmtrain-environment"
    cp "$here/launch" "$work/files/.lmtrain-launch"
    cp "$setup" "$work/files/.lmtrain-setup.sh"
    if [ -z "$repo" ]; then
        tree=$(git -C "$here" rev-parse "$branch^{tree}")
        (cd "$(git -C "$here" rev-parse --show-toplevel)" && git archive --format=tar.gz "$branch") > "$work/files/.lmtrain-copy.tar.gz"
    fi
    stamp=$({ cat "$setup"; echo "$repo $branch $tree"; } | cksum | tr ' ' -)
    code=$UNREACHED
    chmod 600 "$work/files"/.lmtrain-*
    tpus scp "$work/files"/.lmtrain-* "$name:" --worker=all < /dev/null > "$work/error" 2>&1 || { print_error; return 0; }
    on_workers "${1:+rm -f ~/.lmtrain-stamp; }lock=~/lmtrain/logs/$run_id.lock; code=0
        if [ \"\$(cat ~/.lmtrain-stamp 2> /dev/null)\" != $stamp ] && { [ ! -f \$lock ] || flock --shared --nonblock \$lock true; }; then
            rm -f ~/.lmtrain-stamp; REPO=$(printf %q "$repo") BRANCH=$(printf %q "$branch") bash ~/.lmtrain-setup.sh; code=\$?
            [ \$code -ne 0 ] || echo $stamp > ~/.lmtrain-stamp
        fi; echo lmtrain-tpu: \$USER@\$HOSTNAME: exit \$code"
}

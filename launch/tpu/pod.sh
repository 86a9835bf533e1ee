#!/usr/bin/env bash
# From your machine to a Cloud TPU pod and back: asks for the pod, waits for it, puts this commit on every worker, starts the same
# launch.train on all of them, shows the log, resumes, and deletes. Everything goes through gcloud, one command a step; --dry-run
# prints the steps instead of taking them. What a worker is told is one shell line, so that it can be read, and pasted.
set -euo pipefail

usage() {
  cat <<'EOT'
usage: launch/tpu/pod.sh COMMAND [--option value ...] [-- CONFIG [--train-option value ...]]

commands
  create   request the pod as a queued resource
  wait     until the request is ACTIVE; an error if it fails, or after --timeout
  setup    put the current commit on all workers and install it (Python 3.11, exactor[tpu]); again after each new commit
  run      start launch.train on all workers, in tmux: it goes on when the connection is lost
  follow   show the log until the run ends; Ctrl-C ends only the showing
  stop     press Ctrl-C in the run: it writes a checkpoint and ends
  resume   as run, from the last checkpoint of the run directory
  delete   delete the pod and its request, after asking
  all      create, wait, setup, run

options, the same for every command, and the environment variables that stand in for them
  --project ID        EXACTOR_PROJECT    Google Cloud project
  --zone ZONE         EXACTOR_ZONE       such as us-west4-a
  --topology NAME     EXACTOR_TOPOLOGY   generation and chips, as launch.plan names them: v5e:8x8, v5p:4x4x4, v6e:4x4, v4:2x2x2
  --bucket NAME       EXACTOR_BUCKET     a bucket that setup and run mount at /mnt/NAME on every worker
  --run-dir PATH      EXACTOR_RUN_DIR    directory all workers share, new for each run; default with --bucket: /mnt/BUCKET/POD
  --name POD          EXACTOR_NAME       name of the pod; default exactor
  --spot              cheaper, and may be taken away: then delete, create, wait, setup, resume
  --worker N|all      whose log follow shows; default 0
  --timeout SECONDS   longest wait for the pod; default 7200
  --interval SECONDS  between two looks at its state; default 30
  --yes               delete without asking; nobody is asked either where there is no terminal
  --dry-run           print every command that would be run, ready to paste, and run none
  --help              this text

A whole session, on 16 chips:

  gcloud auth login && ssh-add ~/.ssh/google_compute_engine    # gcloud wants the key in the agent to reach several workers
  gcloud storage buckets create gs://my-runs --project=my-project --location=us-west4 \
    --uniform-bucket-level-access --enable-hierarchical-namespace    # so that the rename that ends a checkpoint is atomic
  export EXACTOR_PROJECT=my-project EXACTOR_ZONE=us-west4-a EXACTOR_BUCKET=my-runs
  launch/tpu/pod.sh all --topology v5e:4x4 --spot -- quickstart --fsdp 16 --seed 1
  launch/tpu/pod.sh follow
  launch/tpu/pod.sh delete

Exit status: 0 done, 1 a step failed, 2 refused before anything was run, 130 interrupted.
EOT
}

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }
refuse() { say "error: $*"; exit 2; }

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || refuse "bash is $BASH_VERSION, wanted 4.4 or newer"

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
commands='create wait setup run follow stop resume delete all'
command='' train_arguments=()
project=${EXACTOR_PROJECT:-} zone=${EXACTOR_ZONE:-} topology=${EXACTOR_TOPOLOGY:-} name=${EXACTOR_NAME:-exactor}
bucket=${EXACTOR_BUCKET:-} run_dir=${EXACTOR_RUN_DIR:-} worker=0 timeout=7200 interval=30
spot=false yes=false dry_run=false

# --- what was asked for, and whether it can be ---------------------------------------------------------------------------------

parse() {
  while (($#)); do
    case $1 in
      --) train_arguments=("${@:2}"); return ;;
      --help | -h) usage; exit 0 ;;
      --spot) spot=true; shift ;;
      --yes) yes=true; shift ;;
      --dry-run) dry_run=true; shift ;;
      --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
      -*)
        (($# > 1)) || refuse "$1 is the last word, wanted an option and its value; see --help"
        set_option "$1" "$2"
        shift 2
        ;;
      *)
        [[ -z $command ]] || refuse "'$1' follows the command $command, wanted options, or -- and what launch.train gets"
        command=$1
        shift
        ;;
    esac
  done
}

set_option() { # option value
  case $1 in
    --project) project=$2 ;;
    --zone) zone=$2 ;;
    --topology) topology=$2 ;;
    --bucket) bucket=$2 ;;
    --run-dir) run_dir=$2 ;;
    --name) name=$2 ;;
    --worker) worker=$2 ;;
    --timeout) timeout=$2 ;;
    --interval) interval=$2 ;;
    *) refuse "there is no option $1; see --help" ;;
  esac
}

check() {
  [[ " $commands " == *" $command "* ]] || refuse "the command is '$command', wanted one of: $commands; see --help"
  matches --project "$project" '^[a-z][a-z0-9.:-]+$' "the ID of your Google Cloud project (or EXACTOR_PROJECT)"
  matches --zone "$zone" '^[a-z]+-[a-z]+[0-9]+-[a-z]$' "a zone with this TPU, such as us-west4-a (or EXACTOR_ZONE)"
  matches --name "$name" '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$' "lowercase letters, digits and hyphens, a letter first"
  matches --worker "$worker" '^(all|[0-9]+)$' "the number of a worker, or all"
  matches --timeout "$timeout" '^(0|[1-9][0-9]*)$' "whole seconds"
  matches --interval "$interval" '^(0|[1-9][0-9]*)$' "whole seconds"
  if [[ -n $bucket ]]; then
    matches --bucket "$bucket" '^[a-z0-9][a-z0-9._-]+$' "the bare name of a bucket, without gs://"
    run_dir=${run_dir:-/mnt/$bucket/$name}
  fi
  case $command in create | all) check_topology ;; esac
  case $command in run | resume | all) check_run ;; esac
}

matches() { # option value pattern wanted
  local got=${2:+"'$2'"}
  [[ $2 =~ $3 ]] || refuse "$1 is ${got:-missing}, wanted $4"
}

# Sets accelerator_type and runtime_version. An accelerator type counts chips on v5e and v6e, but TensorCores, two a chip, on v4
# and v5p. Each shape listed here is the one that Cloud TPU gives by default for its number of chips, so that the count names it.
check_topology() {
  local generation=${topology%%:*} shape=${topology#*:} prefix cores_per_chip
  local flat='1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16' cubic='2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8' shapes
  matches --topology "$topology" '^(v4|v5e|v5p|v6e):' "v4, v5e, v5p or v6e and chips, such as v5e:8x8 (or EXACTOR_TOPOLOGY)"
  case $generation in
    v4) prefix=v4 shapes=$cubic cores_per_chip=2 runtime_version=tpu-ubuntu2204-base ;;
    v5e) prefix=v5litepod shapes=$flat cores_per_chip=1 runtime_version=v2-alpha-tpuv5-lite ;;
    v5p) prefix=v5p shapes="$cubic 8x8x16" cores_per_chip=2 runtime_version=v2-alpha-tpuv5 ;;
    v6e) prefix=v6e shapes=$flat cores_per_chip=1 runtime_version=v2-alpha-tpuv6e ;;
  esac
  matches --topology "$topology" "^$generation:(${shapes// /|})\$" "$generation: and one of $shapes"
  accelerator_type=$prefix-$((${shape//x/*} * cores_per_chip))
}

check_run() {
  matches --run-dir "$run_dir" '^/' "the absolute path of a directory that all workers share, or a --bucket instead"
  [[ ${train_arguments[0]:--} != -* ]] ||
    refuse "CONFIG is missing, wanted -- and what launch.train shall get, such as: -- quickstart --seed 1"
  local argument
  for argument in "${train_arguments[@]}"; do
    argument=${argument%%=*}
    case ${argument//_/-} in
      --run-dir | --resume | --distributed) refuse "$argument follows --, wanted it left to $command; --run-dir goes before --" ;;
    esac
  done
}

# What a real run needs of this machine. Workers get a commit, which config.json names; other changes would stay behind unseen.
check_machine() {
  type -P gcloud >/dev/null || refuse "gcloud is not installed; see https://cloud.google.com/sdk/docs/install, or use --dry-run"
  case $command in setup | all) ;; *) return 0 ;; esac
  local changes
  changes=$(git -C "$repository" status --porcelain -- setup.py launch models rl) ||
    refuse "$repository is not a git repository, wanted one: the pod gets its current commit"
  [[ -z $changes ]] || refuse "the pod gets the current commit, and these differ from it; commit them first:"$'\n'"$changes"
  [[ $(git -C "$repository" rev-parse --is-shallow-repository) == false ]] ||
    refuse "$repository is a shallow clone, which cannot be sent; run: git -C $(quote "$repository") fetch --unshallow"
}

# --- how a step is taken -------------------------------------------------------------------------------------------------------

# Each word quoted for any POSIX shell. printf %q would write a line break as $'\n', which only some shells read.
quote() {
  local word separator='' escaped="'\\''"
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="'${word//\'/$escaped}'"
    printf '%s%s' "$separator" "$word"
    separator=' '
  done
}

step() {
  if $dry_run; then
    printf '%s\n' "$(quote "$@")"
  else
    say "+ $(quote "$@")"
    "$@" || fail "that step ended with status $?; none after it was taken"
  fi
}

tpus() { step gcloud compute tpus "$@" "--project=$project" "--zone=$zone"; }
on_workers() { tpus tpu-vm ssh "$name" "--worker=$1" "--command=$2"; } # worker, shell line

all_of() { # shell lines, joined into one that ends with the first that fails
  printf '%s' "$1"
  shift
  (($# == 0)) || printf ' && %s' "$@"
}

# --- the steps -----------------------------------------------------------------------------------------------------------------

create_pod() {
  local options=("--node-id=$name" "--accelerator-type=$accelerator_type" "--runtime-version=$runtime_version")
  if $spot; then options+=(--spot); fi
  tpus queued-resources create "$name" "${options[@]}"
}

wait_for_pod() {
  local describe=(gcloud compute tpus queued-resources describe "$name" "--project=$project" "--zone=$zone")
  local look=("${describe[@]}" '--format=value(state.state)') state last='' unanswered=0
  if $dry_run; then
    printf '# every %s seconds, for at most %s, until it says ACTIVE:\n%s\n' "$interval" "$timeout" "$(quote "${look[@]}")"
    return
  fi
  say "waiting for $name, for at most $timeout seconds; Ctrl-C ends only the waiting"
  SECONDS=0
  while true; do
    if state=$("${look[@]}"); then unanswered=0; else state=UNANSWERED unanswered=$((unanswered + 1)); fi
    [[ $state == "$last" ]] || say "$(printf '%6d s  %s' "$SECONDS" "$state")"
    last=$state
    case $state in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED | DELETING)
        fail "$name is $state and will not become ACTIVE; delete it before you create again. Why: $(quote "${describe[@]}")" ;;
    esac
    ((unanswered < 3)) || fail "gcloud could not tell the state of $name, three times in a row"
    ((SECONDS < timeout)) || fail "$name is $state after $SECONDS seconds, and stays in the queue: wait again, or delete it"
    sleep "$interval"
  done
}

# A bundle, unlike a tarball, brings the commit's name along, and the next one also removes what was deleted.
setup_workers() {
  local bundle=$repository/build/exactor.bundle
  step mkdir -p "$repository/build"
  step git -C "$repository" bundle create "$bundle" HEAD
  tpus tpu-vm scp "$bundle" "$name:exactor.bundle" --worker=all
  on_workers all "$(setup_line)"
}

# shellcheck disable=SC2016,SC2088 # what stands in quotes is for the worker's shell
setup_line() {
  local apt='sudo apt-get -o DPkg::Lock::Timeout=600 -qq' # a fresh machine is still busy with its own updates
  local key=/usr/share/keyrings/cloud.google.asc site=https://packages.cloud.google.com/apt
  local lines=(
    'set -o pipefail'
    'git init -q exactor'
    'git -C exactor fetch -q ~/exactor.bundle HEAD'
    'git -C exactor checkout -q --force --detach FETCH_HEAD'
    "{ command -v tmux >/dev/null || { $apt update && $apt install -y tmux; }; }"
  )
  if [[ -n $bucket ]]; then
    lines+=(
      "curl -fsSL $site/doc/apt-key.gpg | sudo tee $key >/dev/null"
      "echo \"deb [signed-by=$key] $site gcsfuse-\$(lsb_release -cs) main\" | sudo tee /etc/apt/sources.list.d/gcsfuse.list"
      "$apt update && $apt install -y gcsfuse"
      "$(mount_line)"
    )
  fi
  lines+=( # uv brings its own Python: Ubuntu 22.04, which the images are made of, has 3.10
    '{ [ -x ~/.local/bin/uv ] || curl -LsSf https://astral.sh/uv/install.sh | sh; }'
    'cd exactor'
    '~/.local/bin/uv venv -q --allow-existing --python 3.11 .venv'
    "~/.local/bin/uv pip install -q -e '.[tpu]'"
    'git describe --always --abbrev=40'
  )
  all_of "${lines[@]}"
}

# Orbax ends a checkpoint by renaming its directory, and workers must see each other's files at once.
mount_line() {
  local mount="gcsfuse --implicit-dirs --rename-dir-limit=100000 --metadata-cache-ttl-secs=0 $bucket /mnt/$bucket"
  printf '%s' "{ mountpoint -q /mnt/$bucket ||" \
    " { sudo mkdir -p /mnt/$bucket && sudo chown \"\$(id -un)\" /mnt/$bucket && $mount; }; }"
}

# tmux refuses a second session of the same name, so that no worker runs two trainings. The bucket is mounted again because a
# worker that was restarted would write to its own disk instead.
start_run() { # [--resume]
  local train=(.venv/bin/python -u -m launch.train "${train_arguments[@]}" --run-dir "$run_dir" --distributed "$@")
  local lines=() session
  session="exec >>~/exactor.log 2>&1; cd exactor && $(quote "${train[@]}"); echo \"launch.train ended with status \$?\""
  if [[ -n $bucket ]]; then lines+=("$(mount_line)"); fi
  lines+=("tmux new-session -d -s exactor $(quote bash -c "$session")")
  on_workers all "$(all_of "${lines[@]}")"
  $dry_run || say "started on all workers of $name, in the run directory $run_dir; to see the log: follow"
}

# Ends with the run, whose process tmux knows; without one, shows how the last one ended.
# shellcheck disable=SC2016 # what stands in quotes is for the worker's shell
follow_log() {
  local line='if pid=$(tmux list-panes -t exactor -F "#{pane_pid}" 2>/dev/null);'
  line+=' then tail -n 100 -F --pid="$pid" ~/exactor.log; else tail -n 100 ~/exactor.log; fi'
  if [[ $worker == all ]]; then line="{ $line; } | sed -u \"s/^/\$(hostname): /\""; fi
  on_workers "$worker" "$line"
}

delete_pod() {
  if ! $dry_run && ! $yes && [[ -t 0 ]]; then
    local answer=''
    read -r -p "Delete the pod $name in $zone, and what lies on its own disks? [y/N] " answer || true
    [[ $answer == [yY]* ]] || fail "nothing was deleted"
  fi
  tpus queued-resources delete "$name" --force --quiet
}

interrupted() {
  say $'\n'"interrupted; the pod $name and a run on it, where there are any, go on and cost money until: delete"
  exit 130
}

main() {
  parse "$@"
  check
  $dry_run || check_machine
  trap interrupted INT
  case $command in
    create) create_pod ;;
    wait) wait_for_pod ;;
    setup) setup_workers ;;
    run) start_run ;;
    follow) follow_log ;;
    stop) on_workers all 'tmux send-keys -t exactor C-c' ;;
    resume) start_run --resume ;;
    delete) delete_pod ;;
    all)
      create_pod
      wait_for_pod
      setup_workers
      start_run
      ;;
  esac
}

main "$@"

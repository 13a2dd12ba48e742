#!/bin/bash
# Runs on Cloud TPU VMs, on one slice or several, with the gcloud command.
#
#   launch/tpu_vm.sh create     # Requests TPUs, and waits until they are ready.
#   launch/tpu_vm.sh install    # Copies the last commit, and installs it.
#   launch/tpu_vm.sh run --config=configs/yours.py \
#     --config.checkpoint_dir=gs://BUCKET/runs/a
#   launch/tpu_vm.sh logs       # Follows the log of the first worker.
#   launch/tpu_vm.sh stop       # Sends SIGTERM: the run saves and ends.
#   launch/tpu_vm.sh delete     # Releases the TPUs.
#
# Put --dry-run before the action to print its commands without running them.
# Set the parameters below in the environment:
set -euo pipefail

NAME=${NAME:-jaxline}
ZONE=${ZONE:-us-east5-a}
ACCELERATOR=${ACCELERATOR:-v5p-128}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5}
SLICES=${SLICES:-1}
# Flags for gcloud, such as --spot, --reserved, --network=NETWORK and
# --project=PROJECT.
FLAGS=${FLAGS:-}
# A folder of a bucket, such as gs://BUCKET/text, which `install` copies to
# `data` on each worker.
DATA=${DATA:-}

usage() {
  echo "tpu_vm.sh: $1. Usage: launch/tpu_vm.sh [--dry-run]" \
    "create|install|run|logs|stop|delete [ARGUMENT ...]" >&2
  exit 2
}

# Runs a command, or prints it such that you can paste it into a shell.
do_run() {
  if [ -z "$DRY_RUN" ]; then
    "$@"
    return
  fi
  local word
  for word in "$@"; do
    case $word in
      *[!A-Za-z0-9_./:=,@%+-]*)
        printf "'%s' " "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")" ;;
      *) printf '%s ' "$word" ;;
    esac
  done
  echo
}

tpus() {
  do_run gcloud compute tpus queued-resources "$@" "--zone=$ZONE"
}

# Runs a command on workers: NODE, WORKER, COMMAND. NODE and WORKER may be `all`.
on() {
  tpus ssh "$NAME" "--node=$1" "--worker=$2" "--command=$3"
}

create() {
  local nodes=("--node-id=$NAME")
  if [ "$SLICES" -gt 1 ]; then
    nodes=("--node-count=$SLICES" "--node-prefix=$NAME")
  fi
  # shellcheck disable=SC2086  # FLAGS are words.
  tpus create "$NAME" "${nodes[@]}" "--accelerator-type=$ACCELERATOR" \
    "--runtime-version=$RUNTIME" $FLAGS
  if [ -n "$DRY_RUN" ]; then
    tpus describe "$NAME" '--format=value(state.state)'
    return
  fi
  local state=''
  until [ "$state" = ACTIVE ]; do
    state=$(tpus describe "$NAME" '--format=value(state.state)')
    case $state in
      FAILED | SUSPENDED) echo "tpu_vm.sh: $NAME is $state." >&2 && exit 1 ;;
      ACTIVE) ;;
      *) echo "$NAME is $state." && sleep 30 ;;
    esac
  done
}

install() {
  local archive=jaxline.tar.gz copy=''
  if [ -z "$DRY_RUN" ]; then
    archive=$(mktemp)
    # shellcheck disable=SC2064  # The name is local.
    trap "rm -f '$archive'" EXIT
  fi
  do_run git archive --format=tar.gz "--output=$archive" HEAD
  # Copy to the home directory, where no other user can place a link.
  tpus scp "$archive" "$NAME:jaxline.tar.gz" --node=all --worker=all
  if [ -n "$DATA" ]; then
    copy="
mkdir -p data
gcloud storage rsync --recursive $DATA data"
  fi
  # The Python of the VMs may be older than 3.11, so uv installs a newer one.
  on all all "set -e
mkdir -p ~/jaxline
cd ~/jaxline$copy
tar -xzf ~/jaxline.tar.gz
rm ~/jaxline.tar.gz
python3 -m pip install --user --quiet uv
~/.local/bin/uv venv --quiet --allow-existing --python 3.11
~/.local/bin/uv pip install --quiet -e '.[tpu]'"
}

run() {
  case " $* " in
    *" --config.checkpoint_dir="*) ;;
    *) usage "run needs --config.checkpoint_dir=gs://BUCKET/RUN" ;;
  esac
  # The program outlives the connection. It restarts if its exit code asks for
  # it, or if it has lost a worker (docs/reference/reliability.md). If that
  # worker never returns, each start ends after five minutes of waiting, and the
  # loop gives up after five starts.
  on all all "cd ~/jaxline
rm -f stop
cat > run.sh << 'EOF'
tries=0
until [ -e stop ]; do
  SECONDS=0
  .venv/bin/python experiment.py --jaxline_ensure_tpu$(printf ' %q' "$@") &
  echo \$! > run.pid
  wait \$!
  code=\$?
  case \$code in 70 | 75 | 134 | 143) ;; *) exit \$code ;; esac
  [ \$SECONDS -lt 900 ] || tries=0
  tries=\$((tries + 1))
  if [ \$tries = 5 ]; then
    echo \"tpu_vm.sh: ended with \$code; the fifth in a row within 15 minutes.\"
    exit \$code
  fi
done
EOF
nohup setsid bash run.sh >> run.log 2>&1 < /dev/null &"
}

logs() {
  on 0 0 'tail -n 100 -F ~/jaxline/run.log'
}

stop() {
  # shellcheck disable=SC2016  # The workers expand it.
  on all all 'cd ~/jaxline && touch stop && kill -TERM "$(cat run.pid)"'
}

delete() {
  tpus delete "$NAME" --force --quiet
}

DRY_RUN=''
if [ "${1:-}" = --dry-run ]; then
  DRY_RUN=yes
  shift
fi
case ${1:-} in
  create | install | run | logs | stop | delete) "$@" ;;
  '') usage 'the action is missing' ;;
  *) usage "there is no '$1'" ;;
esac

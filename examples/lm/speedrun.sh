#!/usr/bin/env bash
# Trains a baseline and a candidate in turns, with several seeds, and prints
# "keep" or "discard".
#
#   examples/lm/speedrun.sh BASELINE CANDIDATE [FLAG ...]
#   examples/lm/speedrun.sh HEAD ''  # Tests uncommitted changes.
#   examples/lm/speedrun.sh '' --config.experiment_kwargs.config.b2=0.98
#
# BASELINE and CANDIDATE are each a git revision, or flags separated by spaces;
# '' means the working tree. Further flags apply to all runs. The exit status is
# 0 for keep, 1 for discard and 2 for an error.
#
# The learning rate falls until training_steps. So set --config.training_steps=N
# to the number of steps that the baseline takes in BUDGET. A faster candidate
# may then finish its N steps early. To compare both after N steps instead, set
# BUDGET= (empty).
set -euo pipefail
cd "$(dirname "$0")/../.."

SEEDS=${SEEDS:-0 1 2 3}
BUDGET=${BUDGET-60} # Seconds of training for each run.
CONFIG=${CONFIG:-configs/lm.py}
OUT=${OUT:-$PWD/runs/speedrun_$(date +%Y%m%d_%H%M%S)}

if (($# < 2)); then
  echo 'Usage: examples/lm/speedrun.sh BASELINE CANDIDATE [FLAG ...]' >&2
  exit 2
fi
declare -A version=([baseline]=$1 [candidate]=$2) tree
shift 2
mkdir -p "$OUT"
trap 'rm -rf "$OUT"/tree_*; git worktree prune' EXIT
for side in baseline candidate; do
  tree[$side]=$PWD
  if [[ ${version[$side]} == [^-]* ]]; then
    tree[$side]=$OUT/tree_$side
    git worktree add --quiet --detach "${tree[$side]}" "${version[$side]}" ||
      exit 2
    version[$side]=
  fi
done

order='baseline candidate'
for seed in $SEEDS; do
  for side in $order; do
    echo "$side, seed $seed"
    # shellcheck disable=SC2086 # A version may consist of several flags.
    if ! (cd "${tree[$side]}" && python experiment.py --config="$CONFIG" \
      --jaxline_mode=train_and_eval --config.random_seed="$seed" \
      --config.checkpoint_dir="$OUT/$side/$seed" \
      ${BUDGET:+--config.max_seconds="$BUDGET"} ${version[$side]} "$@") \
      >"$OUT/$side.log" 2>&1; then
      tail -n 5 "$OUT/$side.log" >&2
      [[ $side == baseline ]] && exit 2
      echo 'discard: the candidate failed.'
      exit 1
    fi
  done
  order=$([[ $order == baseline* ]] && echo candidate baseline ||
    echo baseline candidate)
done
status=0
python -m jaxline.runs compare --seeds "$OUT/baseline" "$OUT/candidate" ||
  status=$?
((status)) || echo keep
((status == 1)) && echo discard
exit "$status"

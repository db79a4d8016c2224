#!/usr/bin/env bash
# An elastic run under SLURM: one process per node, which has all of the node's GPUs.
#
#   sbatch docs/launch_slurm_elastic.sh --config gpt2_moe_medium --config.mesh.expert=8 --config.train.batch_size=96 --config.train.tokens_per_step=393216 --workdir /shared/runs/a
#
# --no-kill keeps the job when a node fails: the processes of the other nodes go on with a smaller
# mesh. Each node has a job step of its own, which is started again until it ends for good, so that a
# node that SLURM returns to service is taken back. 96 rows divide over 1, 2, 3 and 4 nodes of 8 GPUs.
#SBATCH --job-name=scmoe-elastic
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export SCMOE_COORDINATOR=${nodes[0]}:8476
export SCMOE_NUM_PROCESSES=${#nodes[@]}

# One node's process, again and again; its last exit code.
keep() {
  local number=$1 node=$2 step="" told="" code
  shift 2
  trap 'told=1; [ -n "$step" ] && kill -TERM "$step" 2>/dev/null' TERM
  while [ -z "$told" ]; do
    SCMOE_PROCESS_ID=$number srun --nodes=1 --ntasks=1 --nodelist="$node" --exact --export=ALL \
      .venv/bin/python -m scmoe.train "$@" --restarts=5 --elastic &
    step=$!
    [ -n "$told" ] && kill -TERM "$step"  # told between the check and the start
    wait "$step"; code=$?
    [ "$code" -gt 128 ] && { wait "$step"; code=$?; }
    step=""
    case $code in 0|2|3|4|5|6|7|75|130) return "$code";; esac
    [ -n "$told" ] && return "$code"
    sleep 30 & step=$!  # in the background: bash runs a trap only once a command in front has ended
    [ -n "$told" ] || wait "$step"
    step=""
  done
  return 75
}

children=()
for number in "${!nodes[@]}"; do
  keep "$number" "${nodes[$number]}" "$@" &
  children+=($!)
done
trap 'kill -TERM "${children[@]}" 2>/dev/null' TERM
status=0
for child in "${children[@]}"; do
  wait "$child"; code=$?
  [ "$code" -gt 128 ] && { wait "$child"; code=$?; }
  [ "$code" -eq 75 ] && status=75
  [ "$status" -eq 0 ] && status=$code
done
[ "$status" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"

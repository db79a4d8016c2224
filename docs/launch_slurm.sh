#!/usr/bin/env bash
# One process per GPU on several machines, under SLURM:
#
#   sbatch docs/launch_slurm.sh --config configs/gpt3_moe_xl.py --config.mesh.expert=8 --workdir /shared/runs/xl
#
# Every process finds coordinator, number and its own index in SLURM's variables. The workdir must be
# visible to all machines. SLURM's notice before the time limit (SIGTERM) makes the run save and exit
# with 75, and the job requeues itself.
#SBATCH --job-name=scmoe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=SIGTERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

# Elsewhere than under SLURM, start this on each machine, with its own SCMOE_PROCESS_ID:
#   SCMOE_COORDINATOR=host0:8476 SCMOE_NUM_PROCESSES=2 SCMOE_PROCESS_ID=0 python -m scmoe.train ...
srun .venv/bin/python -m scmoe.train "$@"
status=$?
if [ "$status" -eq 75 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

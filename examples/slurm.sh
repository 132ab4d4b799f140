#!/bin/bash
# Train on 8 machines of 8 GPUs under SLURM: one torchrun a machine, one process a GPU.
#
#     sbatch examples/slurm.sh llama-3-70b --data /data/books --out /shared/runs/70b
#
# All machines must see /shared. When the time is almost up, SLURM sends SIGTERM: the run saves and ends. Submitted
# again, the same command continues it (--or-resume).

#SBATCH --job-name=octavo
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --output=%x-%j.log

set -euo pipefail

if [ "$#" -eq 0 ]; then
    echo "usage: sbatch $0 CONFIG [--KEY VALUE ...]" >&2
    exit 2
fi

# The first machine of the job is where the processes meet.
read -r host < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 20000))

export OMP_NUM_THREADS=8

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node 8 \
    --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$host:$port" \
    -m octavo train "$@" --or-resume

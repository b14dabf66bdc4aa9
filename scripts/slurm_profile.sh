#!/bin/bash
# Profile on every GPU of 2 nodes; rank 0 writes one profile, which names the slowest GPU and how far apart they are.
#   sbatch scripts/slurm_profile.sh -m 7 --tp 4
# Every argument goes to aicb.py. Submit from the checkout, on a file system that all nodes see.
#SBATCH --job-name=aicb-profile
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=00:15:00
set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes 2 --nproc_per_node gpu \
    --rdzv_backend c10d --rdzv_id "$SLURM_JOB_ID" --rdzv_endpoint "$head_node:29500" \
    aicb.py --aiob_enable "$@"

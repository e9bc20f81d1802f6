#!/bin/bash
# via: sbatch
# cause: segmentation-fault
# rank: 1
# host: 0
# signal: 11
#SBATCH --nodes=1 --ntasks=2 --time=5
srun --kill-on-bad-exit=1 bash -c '[ "$SLURM_PROCID" = 1 ] || sleep 600; kill -SEGV $$'

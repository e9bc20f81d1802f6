#!/bin/bash
# via: sbatch
# cause: python-module-missing
# rank: 1
# host: 1
# line: No module named 'horovodx'
#SBATCH --nodes=2 --ntasks-per-node=1 --time=5
srun --label --kill-on-bad-exit=1 bash -c '[ "$SLURM_PROCID" = 1 ] || sleep 600; exec python3 -c "import horovodx"'

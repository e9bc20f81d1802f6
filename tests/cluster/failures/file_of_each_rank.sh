#!/bin/bash
# via: sbatch
# cause: python-error
# rank: 1
# host: 1
# line: KeyError: 'label'
#SBATCH --nodes=2 --ntasks-per-node=1 --time=5
#SBATCH --output=%j_0_log.out --error=%j_0_log.err
srun --kill-on-bad-exit=1 --output=%j_%t_log.out --error=%j_%t_log.err bash -c \
    '[ "$SLURM_PROCID" = 1 ] || sleep 600; exec python3 -c "{}[\"label\"]"'

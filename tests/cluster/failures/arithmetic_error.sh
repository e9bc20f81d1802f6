#!/bin/bash
# via: sbatch
# cause: arithmetic-error
# rank: 0
# host: 0
# signal: 8
#SBATCH --nodes=1 --ntasks=1 --time=5
srun bash -c 'kill -FPE $$'

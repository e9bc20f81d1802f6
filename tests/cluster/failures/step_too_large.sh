#!/bin/bash
# via: sbatch
# cause: step-refused
# rank: -
# host: 0
# line: Unable to create step
#SBATCH --nodes=1 --ntasks=1 --time=5
srun --ntasks=64 --exact true

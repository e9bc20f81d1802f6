#!/bin/bash
# via: sbatch
# cause: segmentation-fault
# rank: 0
# host: 0
# signal: 11
#SBATCH --nodes=1 --ntasks=1 --time=5
gitt --version
echo iteration 1
srun bash -c 'echo iteration 2; kill -SEGV $$'

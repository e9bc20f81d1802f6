#!/bin/bash
# via: sbatch
# cause: -
# rank: 0
# host: 0
# exit_code: 3
#SBATCH --nodes=1 --ntasks=1 --time=5
gitt --version
srun bash -c 'for n in {1..20}; do echo "iteration $n: residual 0.1"; done; exit 3'

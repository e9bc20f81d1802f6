#!/bin/bash
# via: sbatch
# cause: node-failed
# rank: -
# host: 1
# end: node
# fix: --exclude
#SBATCH --nodes=2 --ntasks-per-node=1 --time=15 --no-requeue
srun sleep 600

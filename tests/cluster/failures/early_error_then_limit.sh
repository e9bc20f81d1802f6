#!/bin/bash
# via: sbatch
# cause: time-limit
# rank: -
# host: -
# end: time
#SBATCH --nodes=1 --ntasks=1 --time=5
nvidia-smii
echo epoch 1
sleep 600

#!/bin/bash
#SBATCH --partition normal --time 1:0:0 --nodes 1
#SBATCH --profile=task --acctg-freq=task=15
#SBATCH --cpu-freq=high --core-spec=0
#SBATCH --spread-job --use-min-nodes --gres-flags=enforce-binding
#SBATCH --no-kill --hold

srun ./program input.dat

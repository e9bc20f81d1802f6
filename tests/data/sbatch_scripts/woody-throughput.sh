#!/bin/bash -l
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --time=10:00:00
#SBATCH --array=0-31
#SBATCH --export=NONE

./program $SLURM_ARRAY_TASK_ID

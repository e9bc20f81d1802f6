#!/bin/bash
#SBATCH -A ABC123
#SBATCH -J sweep
#SBATCH -N 1
#SBATCH -t 0:15:00
#SBATCH --array=1-100%10
#SBATCH -o sweep_%A_%a.out

srun ./program --case $SLURM_ARRAY_TASK_ID

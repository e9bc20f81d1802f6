#!/bin/bash
#SBATCH -A m9999
#SBATCH -C cpu
#SBATCH -q regular
#SBATCH -t 2:00:00
#SBATCH -N 2
#SBATCH --ntasks-per-node=128
#SBATCH -c 2

export OMP_NUM_THREADS=1
srun --cpu-bind=cores ./ocean

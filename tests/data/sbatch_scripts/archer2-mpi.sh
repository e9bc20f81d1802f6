#!/bin/bash
# Slurm job options
#SBATCH --job-name=example
#SBATCH --time=0:20:0
#SBATCH --nodes=4
#SBATCH --tasks-per-node=128
#SBATCH --cpus-per-task=1

#SBATCH --account=t01
#SBATCH --partition=standard
#SBATCH --qos=standard

export OMP_NUM_THREADS=1
srun --distribution=block:block --hint=nomultithread ./vasp

#!/bin/bash
#SBATCH --job-name=hybrid
#SBATCH --partition=development
#SBATCH --nodes=2
#SBATCH --ntasks=8
#SBATCH --cpus-per-task=14
#SBATCH --time=00:10:00

export OMP_NUM_THREADS=14
ibrun ./hybrid

#!/bin/bash
#SBATCH --job-name=test_parallel
#SBATCH -D .
#SBATCH --output=mpi_%j.out
#SBATCH --error=mpi_%j.err
#SBATCH --ntasks=64
#SBATCH --time=00:02:00
#SBATCH --qos=gp_debug
#SBATCH --account=bsc00

srun ./program input.dat

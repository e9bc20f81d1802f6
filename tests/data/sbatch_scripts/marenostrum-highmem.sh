#!/bin/bash
#SBATCH --qos=gp_ehpc
#SBATCH --constraint=highmem
#SBATCH --ntasks=56
#SBATCH --cpus-per-task=2
#SBATCH --tasks-per-node=28
#SBATCH --exclusive
#SBATCH --time=3-00

srun ./program input.dat

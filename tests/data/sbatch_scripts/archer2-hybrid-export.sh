#!/bin/bash
#SBATCH --export=none
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --hint=nomultithread
#SBATCH --distribution=block:block
#SBATCH --partition=highmem --qos=highmem
#SBATCH --time=3:0:0

srun ./program input.dat

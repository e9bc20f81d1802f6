#!/bin/bash
#SBATCH -p bigmem
#SBATCH -n 1
#SBATCH --cpus-per-task=16
#SBATCH --mem=500G
#SBATCH --time=7-00:00:00

srun ./program input.dat

#!/bin/bash
#SBATCH -A m9999_g -C gpu -q debug
#SBATCH -N 2 -n 8 -c 32 -G 8
#SBATCH -t 0:30:00
#SBATCH --mail-user=someone@example.org --mail-type=ALL

srun ./program input.dat

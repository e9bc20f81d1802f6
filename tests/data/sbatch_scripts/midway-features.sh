#!/bin/bash
#SBATCH --job-name=knl
#SBATCH --output=knl.out
#SBATCH --partition=normal
#SBATCH --exclusive=user
#SBATCH --ntasks=32
#SBATCH --cores-per-socket=8
#SBATCH --contiguous
#SBATCH --wckey=thesis
#SBATCH --deadline=now+10days

srun ./program input.dat

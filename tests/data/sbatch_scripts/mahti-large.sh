#!/bin/bash
#SBATCH --partition=large
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=128
#SBATCH --time=36:00:00
#SBATCH --account=project_2000000
#SBATCH --mail-type=TIME_LIMIT_80

srun ./program input.dat

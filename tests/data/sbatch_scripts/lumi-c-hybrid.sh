#!/bin/bash
#SBATCH --partition=standard
#SBATCH --account=project_4650001
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --hint=nomultithread

srun ./program input.dat

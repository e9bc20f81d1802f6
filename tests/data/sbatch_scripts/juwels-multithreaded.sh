#!/bin/bash
#SBATCH --account=training0001
#SBATCH --nodes=8
#SBATCH --ntasks=192
#SBATCH --ntasks-per-node=24
#SBATCH --cpus-per-task=2
#SBATCH --partition=batch
#SBATCH --time=06:00:00
#SBATCH --mail-type=BEGIN,END,FAIL

srun ./program input.dat

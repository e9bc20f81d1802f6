#!/bin/bash
#SBATCH --job-name=mc --time=00:30:00 --nodes=2
#SBATCH --ntasks-per-node=16 --cpus-per-task=16
#SBATCH --partition=normal --constraint=mc|cpu
#SBATCH --nice=50

srun ./program input.dat

#!/bin/bash
#SBATCH -J gpujob
#SBATCH -A SOMEBODY-SL2-GPU
#SBATCH -p ampere
#SBATCH --nodes=1
#SBATCH --gres=gpu:1
#SBATCH --time=02:00:00
#SBATCH --mail-type=ALL
#SBATCH --no-requeue

srun ./program input.dat

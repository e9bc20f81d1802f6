#!/bin/bash
#SBATCH -q preempt
#SBATCH -C gpu
#SBATCH -N 1
#SBATCH --time=24:00:00
#SBATCH --time-min=02:00:00
#SBATCH --comment=96:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --gpus-per-node=4

srun ./program input.dat

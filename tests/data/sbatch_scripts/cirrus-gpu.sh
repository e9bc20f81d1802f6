#!/bin/bash
#SBATCH --partition=gpu
#SBATCH --qos=gpu
#SBATCH --gres=gpu:4
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --time=0:20:0

srun ./program input.dat

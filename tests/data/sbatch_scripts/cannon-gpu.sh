#!/bin/bash
#SBATCH -p gpu
#SBATCH --gres=gpu:a100:1
#SBATCH -n 8
#SBATCH -N 1
#SBATCH --mem=64000
#SBATCH -t 1-0
#SBATCH --open-mode=append

srun ./program input.dat

#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --constraint="a100&gpu80"
#SBATCH --mem=128G
#SBATCH --time=23:59:59
#SBATCH --exclude=gn0

srun ./program input.dat

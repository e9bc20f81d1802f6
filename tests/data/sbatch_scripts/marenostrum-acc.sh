#!/bin/bash
#SBATCH -A bsc00 -q acc_ehpc
#SBATCH --ntasks=8
#SBATCH --cpus-per-task=20
#SBATCH --gres=gpu:4
#SBATCH --nodes=2
#SBATCH --time=10:00

srun ./program input.dat

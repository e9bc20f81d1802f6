#!/bin/bash -l
#SBATCH --gres=gpu:a100:2
#SBATCH --partition=a100
#SBATCH -C a100_80
#SBATCH --time=6:00:00
#SBATCH --job-name=bert
#SBATCH --export=NONE

unset SLURM_EXPORT_ENV
module load python
srun python train.py

#!/bin/bash
#SBATCH --account=m9999_g
#SBATCH --constraint=gpu
#SBATCH --qos=regular
#SBATCH --time=45
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-task=1
#SBATCH --gpu-bind=none

srun python train.py

#!/bin/bash
#SBATCH --account=training0001
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=12
#SBATCH --output=gpu-out.%j
#SBATCH --error=gpu-err.%j
#SBATCH --time=00:15:00
#SBATCH --partition=booster
#SBATCH --gres=gpu:4

export CUDA_VISIBLE_DEVICES=0,1,2,3
srun --cpu_bind=v --accel-bind=gn ./program

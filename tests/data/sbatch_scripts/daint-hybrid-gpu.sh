#!/bin/bash -l
#SBATCH --job-name="pi"
#SBATCH --account="s0001"
#SBATCH --time=01:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-core=1
#SBATCH --ntasks-per-node=12
#SBATCH --cpus-per-task=1
#SBATCH --partition=normal
#SBATCH --constraint=gpu
#SBATCH --hint=nomultithread

export CRAY_CUDA_MPS=1
srun ./pi

#!/bin/bash
#SBATCH --account=def-someuser
#SBATCH --gpus-per-node=a100:4
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=0-02:59

export MASTER_ADDR=$(hostname)
srun python ddp.py

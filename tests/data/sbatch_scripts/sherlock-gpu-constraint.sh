#!/usr/bin/bash
#SBATCH --job-name=infer
#SBATCH -p gpu
#SBATCH -c 4
#SBATCH --gpus=1
#SBATCH --constraint=GPU_MEM:80GB
#SBATCH --time=2:00:00
#SBATCH --mem=32GB

ml python/3.9
python infer.py

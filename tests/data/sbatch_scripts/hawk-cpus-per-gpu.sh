#!/bin/bash
#SBATCH -p gpu --gpus=2 --cpus-per-gpu=4
#SBATCH --mem-per-gpu=16G --gpu-freq=high
#SBATCH -t 60 --kill-on-invalid-dep=yes --wait-all-nodes=1

srun ./program input.dat

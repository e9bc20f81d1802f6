#!/bin/bash
#SBATCH -A ABC123
#SBATCH -J stars
#SBATCH -o %x-%j.out
#SBATCH -t 00:05:00
#SBATCH -p batch
#SBATCH -N 4

srun -N4 -n32 -c7 --gpus-per-task=1 --gpu-bind=closest ./stars

#!/bin/bash
#SBATCH -J cfd
#SBATCH -D ./
#SBATCH --time=00:30:00
#SBATCH --no-requeue
#SBATCH --export=NONE
#SBATCH --partition=micro
#SBATCH --nodes=4-8
#SBATCH --ntasks-per-node=24
#SBATCH --cpus-per-task=2
#SBATCH --switches=1@24:00:00
#SBATCH --constraint="scratch&work"

srun ./program input.dat

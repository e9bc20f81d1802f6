#!/bin/bash
#SBATCH -A standby
#SBATCH --nodes=1 --ntasks=2 --gpus-per-node=2 --ntasks-per-socket=1
#SBATCH --time=4:00:00 --sockets-per-node=2
#SBATCH --mincpus=8

srun ./program input.dat

#!/bin/bash
#SBATCH -A ABC123
#SBATCH -N 2
#SBATCH -C nvme
#SBATCH -S 0
#SBATCH -t 1:00:00
#SBATCH --threads-per-core=1

srun -N2 -n2 cp data /mnt/bb/$USER/
srun -N2 -n16 ./program

#!/bin/bash
#SBATCH --nodes=1
#SBATCH --constraint=mem192
#SBATCH --partition=devel
#SBATCH --time=2:00:00
#SBATCH --threads-per-core=1
#SBATCH --distribution=block:cyclic:fcyclic

srun ./program input.dat

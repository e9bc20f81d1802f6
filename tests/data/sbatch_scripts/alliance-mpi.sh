#!/bin/bash
#SBATCH --account=def-someuser
#SBATCH --ntasks=96
#SBATCH --mem-per-cpu=1024M      # M is the default
#SBATCH --time=0-00:05           # DD-HH:MM

srun ./mpi_program

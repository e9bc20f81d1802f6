#!/bin/bash
#!
#! Example for MPI on many nodes
#!
#SBATCH -J cpujob
#SBATCH -A SOMEBODY-SL3-CPU
#SBATCH -p icelake
#SBATCH --nodes=2
#SBATCH --ntasks=152
#SBATCH --time=02:00:00
#SBATCH --mail-type=NONE
##SBATCH --no-requeue

. /etc/profile.d/modules.sh
mpirun -ppn 76 -np 152 ./program

#!/bin/bash
#SBATCH -N1 -n1
#SBATCH --time=1:00:00
#SBATCH --mem=3000MB
#SBATCH -p g100_usr_prod
#SBATCH --tmp=10G

srun ./program input.dat

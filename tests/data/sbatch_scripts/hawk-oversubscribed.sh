#!/bin/bash
#SBATCH -p normal -N 1-2 -n 16 -s -O
#SBATCH --mem-per-cpu 512 -t 30:00 -x cn15
#SBATCH -w cn01,cn02 --comment="two words, and a comma"

srun ./program input.dat

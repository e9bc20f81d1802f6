#!/bin/bash
#SBATCH -c 1                # cores
#SBATCH -t 0-00:10          # D-HH:MM
#SBATCH -p test             # partition
#SBATCH --mem=100           # megabytes of all cores
#SBATCH -o myoutput_%j.out  # %j is the id
#SBATCH -e myerrors_%j.err

module load python
python -c 'print("Hi there.")'

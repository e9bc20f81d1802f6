#!/bin/bash
#SBATCH --qos=shared
#SBATCH --constraint=cpu
#SBATCH --ntasks=4
#SBATCH --licenses=scratch,cfs
#SBATCH --mem=8GB
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300

trap 'touch stop' USR1
srun ./program &
wait

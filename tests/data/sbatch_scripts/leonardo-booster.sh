#!/bin/bash
#SBATCH --job-name=md
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:4
#SBATCH --partition=boost_usr_prod
#SBATCH --qos=boost_qos_dbg
#SBATCH --time=00:30:00
#SBATCH --mem=494000
#SBATCH --exclusive
#SBATCH --account=IscrC_none

srun ./program input.dat

#!/bin/bash
#SBATCH --job-name=myTest
#SBATCH --account=project_2000000
#SBATCH --time=02:00:00
#SBATCH --mem-per-cpu=2G
#SBATCH --partition=small
#SBATCH --gres=nvme:100

cp data $LOCAL_SCRATCH
srun ./program

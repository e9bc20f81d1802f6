#!/bin/bash
#SBATCH --array=1-50:2%5
#SBATCH --account=def-someuser
#SBATCH --time=3:00
#SBATCH --mem=1500
#SBATCH --cpus-per-task=2

./program < case${SLURM_ARRAY_TASK_ID}

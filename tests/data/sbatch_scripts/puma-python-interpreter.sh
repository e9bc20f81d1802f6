#!/usr/bin/env python3
#SBATCH --time=5
#SBATCH -c 2 --mem 600

import os

print(os.environ['SLURM_JOB_ID'])

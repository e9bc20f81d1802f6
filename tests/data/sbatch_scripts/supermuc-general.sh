#!/bin/bash
# Name of the job
#SBATCH -J climate
# Output and error
#SBATCH -o ./%x.%j.out
#SBATCH -e ./%x.%j.err
# Initial working directory
#SBATCH -D ./
# Mail
#SBATCH --mail-type=END
#SBATCH --mail-user=someone@example.org
# Wall clock limit
#SBATCH --time=24:00:00
#SBATCH --no-requeue
# Environment
#SBATCH --export=NONE
#SBATCH --get-user-env
#SBATCH --account=pn00aa
#SBATCH --partition=general
# Resources
#SBATCH --nodes=20
#SBATCH --ntasks-per-node=48

module load slurm_setup
mpiexec -n $SLURM_NTASKS ./climate

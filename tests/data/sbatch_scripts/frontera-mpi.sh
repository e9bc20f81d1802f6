#!/bin/bash
#SBATCH -J wave            # name of the job
#SBATCH -o wave.o%j        # output
#SBATCH -e wave.e%j        # errors
#SBATCH -p normal          # queue
#SBATCH -N 4               # nodes
#SBATCH -n 224             # tasks
#SBATCH -t 01:30:00        # hh:mm:ss
#SBATCH --mail-type=all    # every mail
#SBATCH --mail-user=someone@example.org
#SBATCH -A PROJECT1

module list
pwd
ibrun ./wave

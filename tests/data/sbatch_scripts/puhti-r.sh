#!/bin/bash
#SBATCH --job-name=r_serial
#SBATCH --partition=test
#SBATCH --time=00:05:00
#SBATCH --ntasks=1
#SBATCH --nodes=1
#SBATCH --mem-per-cpu=1000

if test -f ~/.Renviron; then
    sed -i '/TMPDIR/d' ~/.Renviron
fi
srun Rscript --no-save serial.R

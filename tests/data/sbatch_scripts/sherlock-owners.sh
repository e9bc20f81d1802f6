#!/bin/bash
#SBATCH -p owners
#SBATCH --requeue
#SBATCH --time=0-12:00
#SBATCH -n 1 --mem-per-cpu=4G
#SBATCH --signal=B:SIGUSR1@90

_resubmit() {
    sbatch "$0"
}
trap _resubmit SIGUSR1
./program &
wait

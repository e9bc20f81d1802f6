#!/bin/bash
#SBATCH -J serial -p small -N 1 -n 1 -t 02:00:00
#SBATCH --output=serial.%j

./program

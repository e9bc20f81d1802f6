#!/bin/bash --login
#SBATCH --partition=serial
#SBATCH --qos=serial
#SBATCH --time=1-00:00
#SBATCH --ntasks=1
#SBATCH --mem=2G

python post.py

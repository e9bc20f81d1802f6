#!/bin/bash
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=1:30:00
#SBATCH --account=def-someuser

ls inputs | parallel ./program {}

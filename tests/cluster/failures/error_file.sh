#!/bin/bash
# via: sbatch
# cause: python-module-missing
# rank: -
# host: 0
# line: No module named 'einopsx'
#SBATCH --nodes=1 --ntasks=1 --time=5
#SBATCH -o error_file.out -e error_file.err
echo epoch 1
python3 -c "import einopsx"

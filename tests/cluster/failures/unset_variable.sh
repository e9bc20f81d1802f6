#!/bin/bash
# via: sbatch
# cause: -
# rank: -
# host: 0
# exit_code: 1
#SBATCH --nodes=1 --ntasks=1 --time=5
set -u
echo "$DATA_FOLDER_OF_NOBODY"

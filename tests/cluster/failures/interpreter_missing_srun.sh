#!/bin/bash
# via: sbatch
# cause: interpreter-missing
# rank: 0
# host: 0
# line: bad interpreter
#SBATCH --nodes=1 --ntasks=1 --time=5
printf '#!/opt/none/bin/python\n' >no_interpreter.py
chmod +x no_interpreter.py
srun ./no_interpreter.py

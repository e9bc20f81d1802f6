#!/bin/bash
#SBATCH --time=00:15:00
#SBATCH --account=def-someuser

echo 'Hello, world!'
sleep 30

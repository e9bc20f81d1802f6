# submit: -N 1 --ntasks-per-node 1
# cause: python-error
# rank: 0
# host: 0
# line: CalledProcessError
import subprocess

subprocess.run(["false"], check=True)

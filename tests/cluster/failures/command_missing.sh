#!/bin/bash
# submit: -N 1
# cause: command-missing
# rank: 0
# host: 0
# line: nvidia-smii: command not found
# fix: command -v nvidia-smii
nvidia-smii --query-gpu=name
exit $?

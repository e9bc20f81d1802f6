#!/bin/bash
# submit: -N 1
# cause: syntax-error
# rank: 0
# host: 0
# line: SyntaxError
echo 'def train(:' >broken_program.py
exec python3 broken_program.py

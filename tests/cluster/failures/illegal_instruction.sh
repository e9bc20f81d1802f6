#!/bin/bash
# submit: -N 2
# cause: illegal-instruction
# rank: 1
# host: 1
# signal: 4
[ "$RANK" = 1 ] || sleep 600
kill -ILL $$

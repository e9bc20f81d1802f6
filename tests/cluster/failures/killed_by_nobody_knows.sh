#!/bin/bash
# submit: -N 2 --ntasks-per-node 2
# cause: killed
# rank: 2
# host: 1
# signal: 9
# certain: no
[ "$RANK" = 2 ] || sleep 600
kill -KILL $$

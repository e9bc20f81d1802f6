#!/bin/bash
# submit: -N 2 --ntasks-per-node 2
# cause: -
# rank: 1
# host: 0
# exit_code: 7
[ "$RANK" = 1 ] || sleep 600
echo "computing"
exit 7

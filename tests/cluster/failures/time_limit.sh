#!/bin/bash
# submit: -N 2 -t 2m
# cause: time-limit
# rank: -
# host: -
# end: time
# fix: --time 00:02:00
exec sleep 600

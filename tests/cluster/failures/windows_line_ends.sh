#!/usr/bin/env bash
# submit: -N 1
# cause: wrong-interpreter-line
# rank: 0
# host: 0
# fix: sed -i
echo begin

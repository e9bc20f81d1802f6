#!/bin/bash
# submit: -N 1 --chdir LOCAL
# site: run_root: FOLDER/runs
# cause: workdir-missing
# rank: -
# host: 0
# line: chdir
true

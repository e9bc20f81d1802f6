#!/bin/bash
# submit: -N 1
# site: modules: [nosuch/9.9]
# cause: module-load-failed
# rank: -
# host: 0
# line: nosuch/9.9
# fix: module avail nosuch/9.9
true

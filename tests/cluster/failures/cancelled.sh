#!/bin/bash
# submit: -N 2
# cause: cancelled
# rank: -
# host: -
# end: scancel
exec sleep 600

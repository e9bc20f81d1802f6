# submit: -N 1 --ntasks-per-node 1
# cause: python-error
# rank: 0
# host: 0
# line: JSONDecodeError
import json

json.loads("")

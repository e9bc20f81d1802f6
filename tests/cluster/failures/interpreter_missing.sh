#!/opt/no-such-python/bin/python
# submit: -N 1
# cause: interpreter-missing
# rank: 0
# host: 0
print("begin")

# submit: -N 1
# cause: usage-error
# rank: 0
# host: 0
# line: --learning-rat
import argparse

argparse.ArgumentParser().parse_args(["--learning-rat", "1"])

# submit: -N 1
# cause: no-internet
# rank: 0
# host: 0
# certain: no
# line: urlopen error
from urllib.request import urlopen

urlopen("https://data.invalid/train.tar")

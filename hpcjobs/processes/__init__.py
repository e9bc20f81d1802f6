"""The processes of this machine, and the only place where programs are started.

Apart from `programs` and `deferred` these modules need only the standard library of Python 3.6, because they also run
on nodes (`hpcjobs.packing`). Their annotations are quoted, since Python 3.6 would evaluate them.
"""

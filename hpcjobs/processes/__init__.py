"""The processes of this machine, and the one place where programs are started.

Apart from `programs` these modules need only the standard library of Python 3.6: what runs on a node takes them with it
(`hpcjobs.pyz`). Their annotations are quoted, since Python 3.6 would evaluate them.
"""

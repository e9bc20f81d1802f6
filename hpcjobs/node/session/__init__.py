"""Runs an interactive session on a node: a server that answers on one private port, and the way to it from outside.

All of it goes into one file of the run folder, ``session.pyz``, which any Python from 3.9 on runs: the Python that has
Jupyter need not have hpcjobs.

    python session.pyz serve           on the node, by the job's script
    python session.pyz relay           on the login node: a socket there leads to the server
    python session.pyz carry           on the node, started by ``relay`` through srun
"""

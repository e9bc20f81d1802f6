"""Code that runs on the first node of a job with any Python from 3.6 on: it decides about further attempts.

Standard library and few shared modules of hpcjobs: the run folder contains it as ``node.pyz``.
"""

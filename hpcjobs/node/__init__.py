"""Code that runs on the first node of a job with any Python from 3.6 on: it decides about further attempts.

Standard library only, and nothing of the rest of hpcjobs: it is sent along as ``node.pyz`` in the run folder.
"""

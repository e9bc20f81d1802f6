"""Jupyter on a worker node: request, wait, connect and stop; `hpcjobs.node.session` is the node's side."""

"""Jupyter on a worker node: asked for, waited for, reached and ended; `hpcjobs.node.session` is the node's side."""

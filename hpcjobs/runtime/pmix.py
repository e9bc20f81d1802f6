"""Selects the fence that Slurm's PMIx plugin uses between the ranks of several nodes: its ring, not its tree.

With the tree, the default of some fences, ranks may leave MPI_Init while others have not reached its end, if nodes are
busy at the start. The first message kills the late ranks: SIGSEGV in Open MPI's TCP. The ring numbers the contribution
of each node, and no rank died with it (docs/horovod.md has the counts).
"""

FENCES = ("SLURM_PMIX_FENCE", "ring")
"""The variable that the plugin reads in the environment of a step, and its value."""

"""Selects the fence that Slurm's PMIx plugin uses between the ranks of several nodes: its ring, not its tree.

By its tree of nodes, which it uses for some fences by default, ranks may leave MPI_Init while others have
not reached its end, if nodes are busy at the start. The first message kills those: SIGSEGV in Open MPI's TCP. By its
ring, which numbers what each node brings, none did (docs/horovod.md has how often).
"""

FENCES = ("SLURM_PMIX_FENCE", "ring")
"""The variable that the plugin reads in the environment of a step, and its value."""

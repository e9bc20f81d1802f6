"""How Slurm's PMIx plugin lets the ranks of several nodes out of a fence.

By its tree of nodes, which it uses for some fences by default, ranks may leave MPI_Init while others have
not reached its end, if nodes are busy at the start. The first message kills those: SIGSEGV in Open MPI's TCP. By its
ring, which numbers what each node brings, none did (docs/horovod.md has how often).
"""

FENCES = ("SLURM_PMIX_FENCE", "ring")
"""The variable that the plugin reads in the environment of a step, and its value."""

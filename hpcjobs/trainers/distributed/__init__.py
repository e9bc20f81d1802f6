"""Ranks: how they meet, the process group, MPI, their cores, and errors that cross them."""

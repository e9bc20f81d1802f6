"""Checks the nodes of an allocation: how fast each one computes and copies, and which nodes reach each other.

Needs only the standard library and `hpcjobs.runtime`; it starts programs that use MPI and torch.

    check    on the first node: asks all others, judges them, writes ``fabric.json``
    agent    on every node: does the tasks that the check sends
    build    compiles matmul.cpp and kernels.cuh, once per compiler, MPI, kind of CPU and of GPU
    matmul   builds it where it is not built yet, and runs it
"""

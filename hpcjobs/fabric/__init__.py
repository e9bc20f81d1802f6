"""Checks the nodes of an allocation: how fast each one computes and copies, and which nodes reach each other.

Needs the standard library and `hpcjobs.runtime` alone; what it measures with, MPI and torch, it starts as programs.

    check    on the first node: asks all others, judges them, writes ``fabric.json``
    agent    on every node: does what the check asks
    build    compiles matmul.cpp and kernels.cuh, once per compiler, MPI, kind of CPU and of GPU
    matmul   builds it where it is not built yet, and runs it
"""

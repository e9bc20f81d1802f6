"""Each test of a figure has a folder, a home and a scripted cluster of its own."""

from scripted_cluster import scripted_cluster

__all__ = ["scripted_cluster"]

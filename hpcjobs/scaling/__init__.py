"""Scaling studies: one program at several sizes, the laws that fit it, and how far it scales."""

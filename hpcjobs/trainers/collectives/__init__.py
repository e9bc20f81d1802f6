"""Measures what collectives cost by themselves, without a model around them."""

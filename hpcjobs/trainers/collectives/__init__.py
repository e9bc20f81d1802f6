"""Measures the cost of collectives, without a model."""

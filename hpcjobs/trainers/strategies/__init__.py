"""Strategies that spread a model over ranks: one module and one class per strategy; these import torch."""

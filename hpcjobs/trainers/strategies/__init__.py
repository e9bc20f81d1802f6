"""How a model is spread over ranks: one module and one class per strategy; these import torch."""

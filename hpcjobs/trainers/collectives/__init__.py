"""What the collectives cost by themselves, without a model around them."""

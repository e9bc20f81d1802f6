"""One command that proves the GPU path wherever a GPU is: `make gpu` (docs/gpu.md)."""

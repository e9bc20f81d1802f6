# submit: -N 1
# cause: gpu-missing
# rank: 0
# host: 0
# line: Torch not compiled with CUDA enabled
# fix: --gpus-per-node 1
import torch

torch.zeros(1, device="cuda")

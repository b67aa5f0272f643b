# ran at commit e47e104; modules that it imports have moved since
"""Gradients of the float8 output layer compared with float64: python gradient.py before|now, in the program's folder."""

import sys

sys.path.insert(0, ".")

import torch
import train_gpt2
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
N, C, V = 256, 64, 4096
x, weight, targets = torch.randn(N, C), torch.randn(V, C) * 0.15, torch.randint(V, (N,))
targets[:128] = torch.arange(128) % 7
exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
(F.cross_entropy(exact_x @ exact_weight.T, targets, reduction="sum") / N).backward()
x.requires_grad_()
weight.requires_grad_()
with torch.autocast("cpu", torch.bfloat16):
    if sys.argv[1] == "before":
        logits = train_gpt2.Float8Matmul.apply(x, weight).float()
        loss = F.cross_entropy(logits, targets, reduction="sum") / N
    else:
        from plumbing.kernels import linear_cross_entropy

        loss = linear_cross_entropy(x, weight, targets) / N
loss.backward()
for name, gradient, exact in (("x", x.grad, exact_x.grad), ("weight", weight.grad, exact_weight.grad)):
    print(f"{sys.argv[1]}: gradient of {name}, relative error {((gradient - exact).norm() / exact.norm()).item():.5f}")

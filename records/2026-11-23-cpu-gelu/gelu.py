"""GELU, forward and backward: torch's, and two ways in blocks: python gelu.py [NUMBERS_PER_BLOCK]"""
import sys
import time

import torch
import torch.nn.functional as F
torch.set_num_threads(1)
A = 2 * (2 / torch.pi) ** 0.5
B = 0.044715 * A
BLOCK = int(sys.argv[1]) if len(sys.argv)>1 else 2**15
ta, half = torch.tensor(A/2), torch.tensor(.5)
one=torch.tensor(A)
class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        for part, out in zip(x.view(-1).split(BLOCK), y.view(-1).split(BLOCK)):
            s = torch.addcmul(ta, part, part, value=B/2).mul_(part).tanh_()
            torch.add(half, s, alpha=.5, out=s)
            torch.mul(part, s, out=out)
        return y
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        result = torch.empty_like(x)
        for part, g, out in zip(x.view(-1).split(BLOCK), grad.contiguous().view(-1).split(BLOCK), result.view(-1).split(BLOCK)):
            s = torch.addcmul(ta, part, part, value=B/2).mul_(part).tanh_()
            torch.add(half, s, alpha=.5, out=s)
            slope = torch.addcmul(one, part, part, value=3*B).mul_(part)
            torch.addcmul(s, slope, torch.addcmul(s, s, s, value=-1), out=out).mul_(g)
        return result
class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        for part, out in zip(x.view(-1).split(BLOCK), y.view(-1).split(BLOCK)):
            torch.div(part, torch.addcmul(-one, part, part, value=-B).mul_(part).exp_().add_(1), out=out)
        return y
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        result = torch.empty_like(x)
        for part, g, out in zip(x.view(-1).split(BLOCK), grad.contiguous().view(-1).split(BLOCK), result.view(-1).split(BLOCK)):
            s = torch.addcmul(-one, part, part, value=-B).mul_(part).exp_().add_(1).reciprocal_()
            slope = torch.addcmul(one, part, part, value=3*B).mul_(part)
            torch.addcmul(s, slope, torch.addcmul(s, s, s, value=-1), out=out).mul_(g)
        return result
for shape in ((2048, 512), (768, 512), (256, 3072)):
    x = (torch.randn(shape)*3).requires_grad_(); g = torch.randn(shape)
    fs = {"torch": lambda x: F.gelu(x, approximate="tanh"), "tanh": Tanh.apply, "exp": Exp.apply}
    times = {n: [[], []] for n in fs}; res={}
    for i in range(41):
        for n, f in fs.items():
            a = time.process_time_ns(); y = f(x); b = time.process_time_ns(); y.backward(g); c = time.process_time_ns()
            times[n][0].append(b-a); times[n][1].append(c-b)
            if i == 0: res[n] = (y.detach(), x.grad)
            x.grad = None
    for n in fs: print(shape, n, *(f"{sorted(t)[len(t)//4]/1e6:.2f} ms" for t in times[n]), "diff", *(f"{(res[n][k]-res['torch'][k]).abs().max().item():.1e}" for k in (0,1)))

# ran at commit 7141a9d; modules that it imports have moved since
"""A step with torch's GELU, one in blocks, and torch's with erf: PYTHONPATH=. python records/.../step.py, in the root."""
import time
from pathlib import Path

import torch
import torch.nn.functional as F
src = Path(__file__).with_name("gelu.py").read_text().split("for shape in")[0]
exec(src.replace("int(sys.argv[1]) if len(sys.argv)>1 else 2**15", "2**15"), globals())
import train_gpt2
from plumbing.distributed import World
torch.manual_seed(0)
torch_gelu = F.gelu
def ours(x, approximate="none"):
    return Exp.apply(x)
class Loader:
    position = 0
    def __init__(self, B, T, V): self.B, self.T, self.V = B, T, V
    def next_batch(self, B): return tuple(torch.randint(self.V, (2, B, self.T)))
for name, shape, B, T, reps in (("nanoGPT", dict(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=320), 12, 64, 60), ("quickstart", dict(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=320), 16, 128, 30), ("768", dict(n_layer=2, n_head=12, n_embd=768, block_size=64, vocab_size=320), 4, 64, 20)):
    config = train_gpt2.TrainConfig(**shape, batch_size=B, sequence_length=T, total_batch_size=B*T)
    model = train_gpt2.GPT(config); opt = train_gpt2.configure_optimizers(model, config)
    loader = Loader(B, T, 320); sc = torch.amp.GradScaler("cpu", enabled=False)
    times = {"torch": [], "ours": [], "erf": []}
    kinds = {"torch": torch_gelu, "ours": ours, "erf": lambda x, approximate: torch_gelu(x)}
    for i in range(reps):
        for k, f in kinds.items():
            F.gelu = f
            a = time.process_time_ns()
            train_gpt2.train_step(model, loader, B, step=0, config=config, optimizers=opt, scaler=sc, signals=[], world=World())
            times[k].append(time.process_time_ns() - a)
    import statistics as st
    m = {k: st.median(v)/1e6 for k, v in times.items()}
    r = sorted(a/b for a, b in zip(times["torch"], times["ours"]))
    print(name, {k: round(v, 2) for k, v in m.items()}, "ratio median", round(m["torch"]/m["ours"], 3), "paired median", round(r[len(r)//2], 3), "quartiles", round(r[len(r)//4],3), round(r[3*len(r)//4],3), flush=True)

"""Peak memory of two uncompiled training steps on a CPU in float32, and an estimate of it. Needs psutil.

    python measure.py N_LAYER N_EMBD B T VOCABULARY
"""

import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt2 as t

import psutil
import torch


def estimate(c, B):
    """Bytes of weights, gradients, AdamW and activations, counted as in the lesson on memory in lessons.ipynb.

    There the logits take 4 bytes per token and id, as compiled code in bfloat16 keeps them and their gradient. Here
    they take 12: the logits, the log-softmax of the loss and its gradient.
    """
    weights = 4 * (12 * c.n_layer * c.n_embd**2 + (c.vocab_size + c.block_size + 13 * c.n_layer + 2) * c.n_embd)
    activations = B * c.block_size * 4 * (16 * c.n_layer * c.n_embd + 3 * c.vocab_size)
    return weights, weights, 2 * weights, activations


def steps(model, optimizers, B, T):
    for _ in range(2):
        x = torch.randint(model.config.vocab_size, (B, T))
        model(x, x, return_logits=False)[1].backward()
        for optimizer in optimizers:
            optimizer.step()


def main():
    n_layer, n_embd, B, T, vocab_size = map(int, sys.argv[1:6])
    config = t.TrainConfig(n_layer=n_layer, n_embd=n_embd, n_head=n_embd // 64, sequence_length=T, compile=False)
    small = t.GPT(t.GPTConfig(T, 512, 1, 1, 64))
    steps(small, t.configure_optimizers(small, config), 1, T)  # loads what torch loads when it is first used
    del small
    base = psutil.Process().memory_info().rss
    model = t.GPT(t.GPTConfig(T, vocab_size, n_layer, n_embd // 64, n_embd))
    peak, done = 0, threading.Event()

    def watch():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, psutil.Process().memory_info().rss)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    steps(model, t.configure_optimizers(model, config), B, T)
    done.set()
    watcher.join()
    parts = [part / 2**30 for part in estimate(model.config, B)]
    print(f"{' '.join(sys.argv[1:6])}: measured {(peak - base) / 2**30:.2f} GiB, estimated {sum(parts):.2f} GiB = "
          "{:.2f} weights + {:.2f} gradients + {:.2f} optimizer + {:.2f} activations".format(*parts))  # fmt: skip


if __name__ == "__main__":
    main()

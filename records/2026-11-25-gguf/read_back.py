"""Does a run's hf/, converted to GGUF by llama.cpp's converter, read back as the same model?

    python records/2026-11-25-gguf/read_back.py RUN MODEL.gguf

RUN is a run's folder, MODEL.gguf what the converter made of RUN/hf. transformers reads the GGUF; it needs the package accelerate.
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, ".")
from train_gpt2 import load_model

run, gguf = sys.argv[1:]
ours, enc = load_model(run)
# GGUF's reader in transformers 5 leaves GPT-2's context length at 1,024, so the configuration is that of hf/
config = GPT2Config.from_pretrained(f"{run}/hf")
theirs = GPT2LMHeadModel.from_pretrained(Path(gguf).parent, gguf_file=Path(gguf).name, config=config).eval()
for prompt in ("The ", "In this proposal", "def main():", "A list of all Python Enhancement Proposals"):
    ids = torch.tensor([enc.encode_ordinary(prompt)])
    expected = [int(row[0]) for row in ours.generate(ids, 60, enc.n_vocab, temperature=0.0)]
    with torch.no_grad():
        found = theirs.generate(ids, max_new_tokens=60, do_sample=False, pad_token_id=enc.eot_token, eos_token_id=None)
        logits = ours(ids)[0][..., : enc.n_vocab] - theirs(ids).logits
    same = sum(a == b for a, b in zip(expected, found[0, ids.size(1) :].tolist()))
    print(f"{prompt!r}: {same} of 60 greedy tokens equal, {len(set(expected))} different ones; logits differ by {logits.abs().max():.1e}")

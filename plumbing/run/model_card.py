"""The model card of a run: hf/README.md, in the form that the Hugging Face hub shows.

It only uses files that the run wrote: run.txt, log.txt and the exported model.
"""

import json
import re
import textwrap
from pathlib import Path

from plumbing.cli.console import first_line, note, plain
from plumbing.files import read_json
from plumbing.run.logs import read_run
from plumbing.run.models import OPENAI_MODELS

MEASURED = {
    "val": "validation loss on unseen tokens, nats per token",
    "val_bpb": "the same in bits per byte, which can be compared between tokenizers",
    "train": "training loss of the last update, nats per token",
    "hella": "HellaSwag, validation split, acc_norm (chance: 0.25)",
}
FACTS = ("started", "ranks", "machine", "versions", "commit")  # shown for each start in run.txt
# not shown: paths on the author's machine, and how the author watched the run
PRIVATE = set("data out_dir init_from branch_from resume device hellaswag_data sample_prompt wandb".split())


def make_card(directory: Path, run_folder: Path, sample: str = "") -> str:
    """README.md for the exported model of a run; "" if that fails, with a note."""
    try:
        return card(directory, run_folder, sample)
    except Exception as error:  # people may have edited run.txt, and the model is complete without a card
        note(f"The exported model has no README.md: {first_line(error)}")
        return ""


def card(directory: Path, run_folder: Path, sample: str) -> str:
    from huggingface_hub import ModelCardData

    run = read_run(run_folder)
    shape = read_json(directory / "config.json", "")
    source = run.config["init_from"]
    dataset = run.fact("data", "").split(", ")[0]
    if dataset == "fineweb-edu":
        dataset = "HuggingFaceFW/fineweb-edu"
    is_on_the_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", dataset)
    header = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2", "train_gpt2"],
        base_model=f"openai-community/{source}" if source in OPENAI_MODELS else None,
        datasets=[dataset] if is_on_the_hub else None,
    )
    rows = ""
    for stream, description in MEASURED.items():
        if stream in run.streams:
            steps, values = run.streams[stream]
            rows += f"| {description} | {values[-1]:.4f} | {steps[-1]:,} |\n"
    is_chat = "chat_template" in read_json(directory / "tokenizer_config.json", "")
    prompt = [{"role": "user", "content": "Hello!"}] if is_chat else "The"
    # indented as a code block, because a sample may look like Markdown
    lines = "\n".join(plain(line, 10**4) for line in sample.strip().splitlines())
    drawn = f"## A sample\n\n{textwrap.indent(lines, '    ')}\n\n" if lines else ""
    facts = ""
    for start in run.starts:
        facts += "".join(f"    {name}: {start[name]}\n" for name in FACTS if start.get(name))
    settings = {name: value for name, value in run.config.items() if name not in PRIVATE}
    return f"""\
---
{header}
---

<!-- Add the language to the lines above, and a license that the training data allow. -->

# A GPT-2 with {shape["n_layer"]} layers

A model with GPT-2's architecture, trained {"from the weights of another model" if source else "from scratch"} with
train_gpt2. It has {shape["n_head"]} attention heads and {shape["n_embd"]} channels, a context of {shape["n_positions"]}
tokens and a vocabulary of {shape["vocab_size"]}.

| measured | value | at step |
|---|---|---|
{rows}
{drawn}## How to load it

```python
from transformers import pipeline

folder = "."  # this folder, or the name of this page on the hub
generate = pipeline("text-generation", folder)
print(generate({json.dumps(prompt)}, max_new_tokens=100)[0]["generated_text"])
```

## How it was trained, at each start

{facts}
```json
{json.dumps(settings, indent=2)}
```
"""

"""The model card of a run: hf/README.md in the form that the Hugging Face hub shows.

Everything in it comes from the files that the run wrote: run.txt, log.txt, the exported model, and the meta.json of
its shards.
"""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plumbing.checkpoint import OPENAI_MODELS
from plumbing.files import read_json
from plumbing.journal import read_log, read_starts
from plumbing.program import first_line, plain

# a data set's name in meta.json: its name on the card; those with a slash are on the hub, and in English
DATASETS = {
    "fineweb-edu": "HuggingFaceFW/fineweb-edu",
    "kjj0/finewebedu10B-gpt2": "kjj0/finewebedu10B-gpt2",
    "HuggingFaceTB/smoltalk": "HuggingFaceTB/smoltalk",
    "python-docs": "the documentation that comes with Python",
    "input": "the author's own text",
    "conversations": "the author's own conversations",
}
# settings that say where files are on the author's machine, or how the run was watched
NOT_OF_THE_MODEL = set(
    "data out_dir init_from branch_from resume device hellaswag_data sample_prompt wandb".split()
)


def make_card(directory, run_folder, sample=""):
    """Return README.md for the exported model of a run; "" if that fails, with a note."""
    try:
        last = last_values(run_folder / "log.txt")
        found = paragraphs(directory, read_starts(run_folder / "run.txt"), last, sample=sample)
        return "\n\n".join(found) + "\n"
    except Exception as error:  # people may have edited run.txt; and the model is complete without a card
        print(f"note: The exported model has no README.md: {first_line(error)}", flush=True)
        return ""


def last_values(path):
    """Return {stream: (updates made, value)}: the last values in log.txt."""
    last = {}
    for step, stream, value in read_log(path):
        # an evaluation at step N sees the weights after N updates; all else at step N belongs to update N + 1
        last[stream] = (step if stream in ("val", "val_bpb", "hella") else step + 1), value
    return last


def paragraphs(
    directory: Path, starts: list[dict[str, Any]], last: dict[str, tuple[int, float]], *, sample: str
) -> Iterator[str]:
    """Yield the paragraphs of README.md: the metadata that the hub reads, then the page."""
    from safetensors.torch import load_file  # slow to import

    config, shape = starts[-1]["config"], read_json(directory / "config.json", "")
    meta_path = Path(config["data"], "meta.json")
    meta = read_json(meta_path, "") if meta_path.is_file() else {}
    name = str(meta.get("dataset"))
    is_of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    dataset = DATASETS.get(name, name if is_of_hub else "")
    is_openais = config["init_from"] in OPENAI_MODELS
    header = "library_name: transformers\npipeline_tag: text-generation\ntags:\n- gpt2\n- train_gpt2\n"
    if "/" in dataset:
        header += f"datasets:\n- {dataset}\n" + "language: en\n" * (name in DATASETS)
    if is_openais:
        header += f"base_model: openai-community/{config['init_from']}\n"
    yield f"---\n{header}---"
    yield "<!-- Add a license to the lines above, one that the training data allow. -->"

    num_parameters = sum(weight.numel() for weight in load_file(directory / "model.safetensors").values())
    yield f"# A GPT-2 with {num_parameters:,} parameters"
    origin = "trained from the weights of another model" if config["init_from"] else "trained from scratch"
    if is_openais:
        origin = f"fine-tuned from OpenAI's {config['init_from']}"
    on_data = f" on {dataset}" if dataset else ""
    yield (
        f"A model of GPT-2's architecture, {origin} with train_gpt2{on_data}. It has\n"
        f"{shape['n_layer']} layers, {shape['n_head']} attention heads and {shape['n_embd']} channels, a context of\n"
        f"{shape['n_positions']} tokens and a vocabulary of {shape['vocab_size']}."
    )
    limit = config["hellaswag_limit"]
    examples = f"the first {limit:,} examples" if limit else "all examples"
    measured = {
        "val": f"validation loss on at most {config['val_tokens']:,} unseen tokens, nats per token",
        "val_bpb": "the same in bits per byte, which can be compared between tokenizers",
        "train": "training loss of the last update, nats per token",
        "hella": f"HellaSwag, {examples} of the validation split, acc_norm (chance: 0.25)",
    }
    if last:
        table = ["| measured | value | after updates |", "|---|---|---|"]
        for stream in filter(last.get, measured):
            updates, value = last[stream]
            table.append(f"| {measured[stream]} | {value:.4f} | {updates:,} |")
        yield "\n".join(table)
    if sample.strip():
        yield "## A sample"
        yield textwrap.indent("\n".join(plain(line, 10**4) for line in sample.strip().splitlines()), "    ")

    yield "## How to load it"
    inputs = 'inputs = tokenizer("The ", return_tensors="pt")'
    if "chat_template" in read_json(directory / "tokenizer_config.json", ""):
        inputs = """\
messages = [{"role": "user", "content": "Hello!"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""
    yield f"""\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or the name of this page on the hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{inputs}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100, do_sample=True, top_k=50)[0]))
```"""

    yield "## How it was trained"
    if dataset:
        yield "Data:"
        tokens = f"{meta['tokens']:,}" if meta.get("tokens") else ""
        yield as_code({"data set": dataset, "tokens": tokens, "tokenizer": plain(meta.get("tokenizer", ""))})
    branched, batch = starts[0].get("branched"), config["total_batch_size"]
    if "train" in last:
        updates = last["train"][0]
        # in a ramp, and in the parent of a branch, the batch had other sizes
        size = "" if config["batch_ramp"] or branched else f" of {batch:,} tokens,\n{batch * updates:,} in all"
        yield f"Training: {updates:,} updates{size}."
    if branched:
        yield f"Branched from another run after {branched['step']} updates."
    for number, start in enumerate(starts):
        yield "Resumed:" if number else "Started:"
        yield as_code({name: start.get(name) for name in ("started", "ranks", "machine", "versions", "commit")})
    yield "Settings:"
    settings = {name: value for name, value in config.items() if name not in NOT_OF_THE_MODEL}
    yield f"```json\n{json.dumps(settings, indent=2)}\n```"


def as_code(facts):
    """The facts that are known, a line each, as code: nothing in it is Markdown."""
    return "\n".join(f"    {name}: {fact}" for name, fact in facts.items() if fact)

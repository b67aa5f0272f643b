"""The model card of a run: hf/README.md in the form that the Hugging Face hub shows.

Everything in it comes from the files that the run wrote: run.txt, log.txt, the exported model, and the meta.json of
its shards.
"""

import json
import re
import textwrap
from pathlib import Path

from plumbing.checkpoint import OPENAI_MODELS
from plumbing.files import read_json
from plumbing.journal import read_log, read_starts
from plumbing.program import first_line, plain

MEASURED = {
    "val": "validation loss on unseen tokens, nats per token",
    "val_bpb": "the same in bits per byte, which can be compared between tokenizers",
    "train": "training loss of the last update, nats per token",
    "hella": "HellaSwag, validation split, acc_norm (chance: 0.25)",
}
# settings that say where files are on the author's machine, or how the run was watched
NOT_OF_THE_MODEL = set(
    "data out_dir init_from branch_from resume device hellaswag_data sample_prompt wandb".split()
)
TO_LOAD = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or the name of this page on the hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{inputs}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100, do_sample=True, top_k=50)[0]))
```"""
PROMPT = 'inputs = tokenizer("The ", return_tensors="pt")'
CONVERSATION = """\
messages = [{"role": "user", "content": "Hello!"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""


def make_card(directory, run_folder, sample=""):
    """Return README.md for the exported model of a run; "" if that fails, with a note."""
    try:
        return "\n\n".join(paragraphs(directory, run_folder, sample)) + "\n"
    except Exception as error:  # people may have edited run.txt; and the model is complete without a card
        print(f"note: The exported model has no README.md: {first_line(error)}", flush=True)
        return ""


def paragraphs(directory, run_folder, sample):
    """Yield the paragraphs of README.md: the metadata that the hub reads, then the page."""
    starts = read_starts(run_folder / "run.txt")
    config, shape = starts[-1]["config"], read_json(directory / "config.json", "")
    meta_path = Path(config["data"], "meta.json")
    meta = read_json(meta_path, "") if meta_path.is_file() else {}
    name = str(meta.get("dataset"))
    name = "HuggingFaceFW/fineweb-edu" if name == "fineweb-edu" else name
    dataset = name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""  # only those are on the hub
    is_openais = config["init_from"] in OPENAI_MODELS

    header = "library_name: transformers\npipeline_tag: text-generation\ntags:\n- gpt2\n- train_gpt2\n"
    header += f"datasets:\n- {dataset}\n" if dataset else ""
    header += f"base_model: openai-community/{config['init_from']}\n" if is_openais else ""
    yield f"---\n{header}---"
    yield "<!-- Add a license to the lines above, one that the training data allow, and the language. -->"

    yield f"# A GPT-2 with {shape['n_layer']} layers"
    origin = "trained from the weights of another model" if config["init_from"] else "trained from scratch"
    if is_openais:
        origin = f"fine-tuned from OpenAI's {config['init_from']}"
    yield (
        f"A model of GPT-2's architecture, {origin} with train_gpt2{f' on {dataset}' if dataset else ''}. It has\n"
        f"{shape['n_layer']} layers, {shape['n_head']} attention heads and {shape['n_embd']} channels, a context of\n"
        f"{shape['n_positions']} tokens and a vocabulary of {shape['vocab_size']}."
    )
    last = {stream: (step, value) for step, stream, value in read_log(run_folder / "log.txt")}
    if last:
        table = ["| measured | value | in step |", "|---|---|---|"]
        for stream in filter(last.get, MEASURED):
            step, value = last[stream]
            table.append(f"| {MEASURED[stream]} | {value:.4f} | {step:,} |")
        yield "\n".join(table)
    if sample.strip():
        yield "## A sample"
        yield textwrap.indent("\n".join(plain(line, 10**4) for line in sample.strip().splitlines()), "    ")

    yield "## How to load it"
    is_chat = "chat_template" in read_json(directory / "tokenizer_config.json", "")
    yield TO_LOAD.format(inputs=CONVERSATION if is_chat else PROMPT)

    yield "## How it was trained"
    for start in starts:  # each time that the run was resumed; as code, in which nothing is Markdown
        facts = {key: start.get(key) for key in ("started", "ranks", "machine", "versions", "commit")}
        yield "\n".join(f"    {key}: {fact}" for key, fact in facts.items() if fact)
    settings = {key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL}
    yield f"```json\n{json.dumps(settings, indent=2)}\n```"

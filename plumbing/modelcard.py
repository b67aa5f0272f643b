"""The model card of a run: hf/README.md in the form that the Hugging Face hub shows, made by modelcard.md.jinja.

Everything in it comes from the files that the run wrote: run.txt, log.txt, the exported model, and the meta.json of
its shards.
"""

import json
import re
from pathlib import Path
from typing import Any

from plumbing.checkpoint import OPENAI_MODELS
from plumbing.files import atomic_write, read_json
from plumbing.journal import read_log, read_starts
from plumbing.program import ROOT, first_line, plain

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


def write_model_card(directory, run_folder, step=None, sample=""):
    """Write README.md to an export of the model after `step` updates (None: all). A failure is noted."""
    try:
        last = last_values(run_folder / "log.txt", step)
        text = card_text(directory, read_starts(run_folder / "run.txt"), last, sample)
        with atomic_write(directory / "README.md") as file:
            file.write(text.encode())
    except Exception as error:  # people may have edited run.txt; and the model is complete without a card
        print(f"note: {directory} has no README.md: {plain(first_line(error))}", flush=True)


def last_values(path, step):
    """Return {stream: (updates made, value)}: the last values in log.txt up to the state after `step` updates."""
    last = {}
    for at, stream, value in read_log(path):
        # an evaluation at step N sees the weights after N updates; all else at step N belongs to update N + 1
        updates = at if stream in ("val", "val_bpb", "hella") else at + 1
        if step is None or updates <= step:
            last[stream] = updates, value
    return last


def card_text(directory, starts, last, sample):
    """Return README.md: the metadata that the hub reads, then the page."""
    from huggingface_hub import ModelCard, ModelCardData  # slow to import
    from safetensors.torch import load_file

    config = starts[-1]["config"]
    meta_path = Path(config["data"], "meta.json")
    meta = read_json(meta_path, "") if meta_path.is_file() else {}
    dataset = DATASETS.get(str(meta.get("dataset")), "")
    data: dict[str, Any] = dict(language="en", datasets=[dataset]) if "/" in dataset else {}
    if config["init_from"] in OPENAI_MODELS:
        data["base_model"] = f"openai-community/{config['init_from']}"
    data |= dict(library_name="transformers", pipeline_tag="text-generation", tags=["gpt2", "train_gpt2"])
    weights = load_file(directory / "model.safetensors")
    settings = {name: value for name, value in config.items() if name not in NOT_OF_THE_MODEL}
    card = ModelCard.from_template(
        ModelCardData(**data),
        template_path=str(ROOT / "plumbing" / "modelcard.md.jinja"),
        number="{:,}".format,
        escaped=escaped,
        num_parameters=sum(weight.numel() for weight in weights.values()),
        shape=read_json(directory / "config.json", ""),
        tokenizer=read_json(directory / "tokenizer_config.json", ""),
        dataset=dataset,
        meta=meta,
        config=config,
        settings=json.dumps(settings, indent=2),
        starts=starts,
        last=last,
        sample="\n".join(plain(line, 10**4) for line in sample.strip().splitlines()),
    )
    return f"{card}\n"


def escaped(text):
    """Escape text for Markdown: put a backslash before its punctuation."""
    return re.sub(r"[!-*/:-@\[-`{-~]", r"\\\g<0>", plain(text))

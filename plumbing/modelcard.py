"""The model card of a run: hf/README.md in the form that the Hugging Face hub shows, and the loss curve.

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

TEMPLATE = """\
---
{{ card_data }}
---

<!-- Add a license to the lines above, one that the training data allow. -->

{%- set batch, limit = config.total_batch_size, config.hellaswag_limit %}
{%- set examples = "the first " + number(limit) + " examples" if limit else "all examples" %}

# A GPT-2 with {{ number(num_parameters) }} parameters

A model of GPT-2's architecture,
{%- if base_model %} fine-tuned from OpenAI's {{ config.init_from }}
{%- elif config.init_from %} trained from the weights of another model
{%- else %} trained from scratch
{%- endif %} with train_gpt2{{ " on " + dataset if dataset }}. It has
{{ shape.n_layer }} layers, {{ shape.n_head }} attention heads and {{ shape.n_embd }} channels, a context of
{{ shape.n_positions }} tokens and a vocabulary of {{ shape.vocab_size }}.
{% if last %}
| measured | value | after updates |
|---|---|---|
{%- for stream, what in {
    "val": "validation loss on " + number(config.val_tokens) + " unseen tokens, nats per token",
    "val_bpb": "the same in bits per byte, which can be compared between tokenizers",
    "train": "training loss of the last update, nats per token",
    "hella": "HellaSwag, " + examples + " of the validation split, acc_norm (chance: 0.25)",
}.items() if stream in last %}
| {{ what }} | {{ "%.4f" % last[stream][1] }} | {{ number(last[stream][0]) }} |
{%- endfor %}
{% endif %}
{%- if has_curve %}
![The loss during training](curve.png)
{% endif %}
{%- if sample %}
## A sample

{{ sample | indent(4, first=True) }}
{% endif %}
## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or the name of this page on the hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{%- if tokenizer.chat_template %}
messages = [{"role": "user", "content": "Hello!"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
{%- else %}
inputs = tokenizer("The ", return_tensors="pt")
{%- endif %}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100, do_sample=True, top_k=50)[0]))
```

## How it was trained

{% if dataset %}Data: {{ dataset }}
{%- if meta.tokens %}, {{ number(meta.tokens) }} tokens of the tokenizer {{ escaped(meta.tokenizer) }}{% endif %}.
{% endif %}
{%- if last.train %}Training: {{ number(last.train[0]) }} updates
{%- if not config.batch_ramp and not starts[0].branched %} of {{ number(batch) }} tokens,
{{ number(batch * last.train[0]) }} in all
{%- endif %}.
{% endif %}
{%- if starts[0].branched %}Branched from another run after {{ starts[0].branched.step }} updates.
{% endif %}
{%- for start in starts %}
{{ "Resumed" if loop.index0 else "Started" }}:
{% for name in ("started", "ranks", "machine", "versions", "commit") if start[name] %}
    {{ name }}: {{ start[name] }}
{%- endfor %}
{% endfor %}
Settings:

```json
{{ settings }}
```
"""


def write_model_card(directory, run_folder, step=None, sample=""):
    """Write curve.png and README.md to an export of the model after `step` updates (None: all). Failures are noted."""
    streams = {}
    try:
        streams = read_streams(run_folder / "log.txt", step)
        write_curve(directory / "curve.png", streams)
    except (Exception, SystemExit) as error:  # matplotlib fails in many ways
        print(f"note: {directory} has no curve.png: {plain(first_line(error))}", flush=True)
    try:
        text = card_text(directory, read_starts(run_folder / "run.txt"), streams, sample)
        with atomic_write(directory / "README.md") as file:
            file.write(text.encode())
    except Exception as error:  # people may have edited run.txt; and the model is complete without a card
        print(f"note: {directory} has no README.md: {plain(first_line(error))}", flush=True)


def read_streams(path, step):
    """Return {stream: {updates made: value}} of log.txt, up to the state after `step` updates."""
    streams = {}
    for at, stream, value in read_log(path):
        # an evaluation at step N sees the weights after N updates; all else at step N belongs to update N + 1
        updates = at if stream in ("val", "val_bpb", "hella") else at + 1
        if step is None or updates <= step:
            streams.setdefault(stream, {})[updates] = value
    return streams


def card_text(directory, starts, streams, sample):
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
        template_str=TEMPLATE,
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
        last={stream: max(values.items()) for stream, values in streams.items()},
        has_curve=(directory / "curve.png").exists(),
        sample="\n".join(plain(line, 10**4) for line in sample.strip().splitlines()),
    )
    return f"{card}\n"


def escaped(text):
    """Text as it is shown in Markdown, in which a backslash takes the meaning from punctuation."""
    return re.sub(r"[!-*/:-@\[-`{-~]", r"\\\g<0>", plain(text))


def write_curve(path, streams):
    from matplotlib.figure import Figure

    if "train" not in streams:
        return
    train, val = streams["train"], streams.get("val", {})
    figure = Figure(figsize=(9, 3.4), layout="constrained", dpi=120)
    panel = figure.subplots()
    panel.plot(list(train), list(train.values()), linewidth=0.7, label="training")
    panel.plot(list(val), list(val.values()), "o-", markersize=4, label="validation")
    panel.set_xscale("log", nonpositive="mask")  # the first losses fall fast
    panel.set(xlabel="updates", ylabel="loss, nats per token")
    panel.legend(frameon=False)
    panel.grid(alpha=0.3)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")

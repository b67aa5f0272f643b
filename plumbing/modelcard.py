"""The model card of a run: hf/README.md in the form that the Hugging Face hub shows, and the loss curve.

Everything in it comes from the files that the run wrote: run.txt, log.txt, the exported model, and the meta.json of
its shards. Anything that the run did not measure is left out.
"""

import datetime
import json
import math
import re
import statistics
from pathlib import Path

from plumbing.cli import count, first_line, plain
from plumbing.files import atomic_write, open_regular, read_json
from plumbing.log import read_log

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
NOT_OF_THE_MODEL = set("data out_dir init_from branch_from resume device hellaswag_data sample_prompt wandb".split())

TEMPLATE = """\
---
{{ card_data }}
---

<!-- Add a license to the lines above, one that the training data allow. -->

# A GPT-2 with {{ num_parameters }} parameters

A model of GPT-2's architecture, {{ origin }} with train_gpt2{{ " on " + dataset if dataset }}. It has
{{ shape.n_layer }} layers, {{ shape.n_head }} attention heads and {{ shape.n_embd }} channels, and reads up to
{{ shape.n_positions }} tokens of a vocabulary of {{ shape.vocab_size }}, without the
unused ids that pad it during training.
{% if rows %}
| measured | value | after updates |
|---|---|---|
{%- for what, value, step in rows %}
| {{ what }} | {{ value }} | {{ step }} |
{%- endfor %}
{% endif %}
{%- if has_curve %}
![The loss during training](curve.png)
{% endif %}
{%- if sample %}
## A sample

{{ fence }}text
{{ sample }}
{{ fence }}
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
{% if dataset %}
- **Data**: {{ dataset }}{{ tokens }}.
{%- endif %}
{%- if updates %}
- **Training**: {{ updates }}.
{%- endif %}
{%- if branched %}
- **Branched** from another run after {{ branched.step }} updates.
{%- endif %}
{%- for start in starts %}
- **{{ "Resumed" if loop.index0 else "Started" }}**: {{ start.started }}; ranks {{ start.ranks }}; machine
  {{ start.machine }}; software {{ start.versions }}{{ "; train_gpt2's commit " ~ start.commit if start.commit }}.
{%- endfor %}

<details>
<summary>All settings of the run</summary>

```json
{{ settings }}
```

</details>
"""


def write_model_card(directory, run_folder, step=None, sample=""):
    """Write curve.png and README.md to an export. A failure prints only a note: the model is complete without them.

    run_folder: the folder of the run, with run.txt and log.txt. step: the number of updates after which the model was
    exported; None: the run's last one. sample: a text written by the model.
    """
    directory, run_folder, streams = Path(directory), Path(run_folder), {}
    try:
        streams = read_streams(run_folder / "log.txt", step)
        write_curve(directory / "curve.png", streams)
    except (Exception, SystemExit) as error:  # matplotlib fails in many ways
        print(f"note: {directory} has no curve.png: {plain(first_line(error))}", flush=True)
    try:
        text = card_text(directory, read_starts(run_folder / "run.txt"), streams, step, sample)
        with atomic_write(directory / "README.md", "w", encoding="utf-8") as file:
            file.write(text)
    except Exception as error:  # people may have edited run.txt
        print(f"note: {directory} has no README.md: {plain(first_line(error))}", flush=True)


def read_streams(path, step):
    """Return {stream: {step: value}} of log.txt, up to the state after `step` updates."""
    streams = {}
    for at, stream, value in read_log(path):
        # an evaluation at step N sees the weights after N updates; the training loss of step N precedes its update
        is_evaluation = stream in ("val", "val_bpb", "hella")
        if step is None or at < step or (at == step and is_evaluation):
            streams.setdefault(stream, {})[at] = value
    return streams


def read_starts(path):
    """Return the starts of a run that run.txt describes: dicts of Markdown, except that "config" is a dict."""
    with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
        blocks = file.read().strip().split("\n\n")
    read = {"config": json.loads, "branched": json.loads}
    starts = []
    for block in blocks:
        fields = [line.partition(":") for line in block.splitlines()]
        starts.append({name: read.get(name, as_code)(text.strip()) for name, _, text in fields})
    return starts


def as_code(text):
    """Return text from a file as Markdown that shows it as it is."""
    return f"`{plain(text).replace('`', chr(39))}`" if text else ""


# ----------------------------------------------------------------------------------------------------------
# The page


def card_text(directory, starts, streams, step, sample):
    """Return README.md: the metadata that the hub reads, then the page."""
    from huggingface_hub import ModelCard, ModelCardData  # slow to import
    from safetensors import safe_open

    config, branched = starts[-1]["config"], starts[0].get("branched", {})
    meta_path = Path(config["data"], "meta.json")
    meta = read_json(meta_path, "") if meta_path.is_file() else {}
    dataset, parent = DATASETS.get(meta.get("dataset"), ""), config["init_from"]
    data = dict(language="en", datasets=[dataset]) if "/" in dataset else {}
    origin = "trained from the weights of another model" if parent else "trained from scratch"
    if parent in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        origin = f"fine-tuned from OpenAI's {parent}"
        data["base_model"] = f"openai-community/{parent}"
    with safe_open(directory / "model.safetensors", "pt") as file:
        num_parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    has_one_size = not config["batch_ramp"] and "total_batch_size" not in branched.get("changed", {})
    tokens_per_step = config["total_batch_size"] if has_one_size else 0
    settings = {name: value for name, value in config.items() if name not in NOT_OF_THE_MODEL}
    card = ModelCard.from_template(
        ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=["gpt2", "train_gpt2"], **data),
        template_str=TEMPLATE,
        num_parameters=f"{num_parameters:,}",
        origin=origin,
        dataset=dataset,
        shape=read_json(directory / "config.json", ""),
        rows=table(streams, config),
        has_curve=(directory / "curve.png").exists(),
        sample="\n".join(plain(line, 10**4) for line in sample.strip().splitlines()),
        fence="`" * max(len(run) + 1 for run in ["``", *re.findall("`+", sample)]),
        tokenizer=read_json(directory / "tokenizer_config.json", ""),
        tokens=f", {meta['tokens']:,} tokens of the tokenizer {as_code(meta['tokenizer'])}" if "tokens" in meta else "",
        updates=describe_updates(step, tokens_per_step, streams),
        branched=branched,
        starts=starts,
        settings=json.dumps(settings, indent=2),
    )
    return f"{card}\n"


def table(streams, config):
    """Return the rows of the table of results: what was measured, its last value, after how many updates."""
    limit = config["hellaswag_limit"]
    examples = f"the first {limit:,} examples" if limit else "all examples"
    names = {
        "val": f"validation loss on {config['val_tokens']:,} tokens that were not trained on, nats per token",
        "val_bpb": "the same in bits per byte, which can be compared between tokenizers",
        "train": "training loss of the last update, nats per token",
        "hella": f"HellaSwag, {examples} of the validation split, acc_norm (chance: 0.25)",
    }
    last = {name: max(streams[name].items()) for name in names if name in streams}
    return [(names[name], f"{value:.4f}", f"{step + (name == 'train'):,}") for name, (step, value) in last.items()]


def describe_updates(step, tokens_per_step, streams):
    """Describe the updates: their number, their tokens, and their total time if the log has the speed of each."""
    updates, rates = step or 1 + max(streams.get("train", [-1])), streams.get("tok/s", {})
    tokens = updates * tokens_per_step
    text = f"{updates:,} updates" if updates else ""
    if tokens:
        text += f" of {tokens_per_step:,} tokens, {tokens:,} in all"
    if tokens and len(rates) == updates:
        seconds = sum(tokens_per_step / rate for rate in rates.values())
        text += f", in {datetime.timedelta(seconds=round(seconds))} ({tokens / seconds:,.0f} tokens per second)"
    return text


def write_curve(path, streams):
    """Draw the losses and, if it was measured more than once, HellaSwag."""
    from matplotlib.figure import Figure

    train, val, hella = (streams.get(name, {}) for name in ("train", "val", "hella"))
    steps, losses = list(train), list(train.values())
    if not losses:
        return
    width = max(1, len(losses) // 100)  # updates per part; the averages of 100 parts make a smooth line
    parts = [slice(first, first + width) for first in range(0, len(losses), width)]
    averages = [[statistics.fmean(values[part]) for part in parts] for values in (steps, losses)]
    num_panels = 2 if len(hella) > 1 else 1
    figure = Figure(figsize=(9, 3.4 * num_panels), layout="constrained", dpi=120)
    panels = figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0]
    panels[0].plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each update")
    panels[0].plot(*averages, color="tab:blue", label=f"training, mean of {count(width, 'update')}")
    panels[0].plot(list(val), list(val.values()), "o-", color="tab:orange", markersize=4, label="validation")
    panels[0].set_ylabel("loss, nats per token")
    # the first losses are far above the rest and would flatten the curve
    shown = losses[len(losses) // 50 :] + list(val.values())[1:]
    panels[0].set_ylim(min(shown) - 0.1, max(shown) + 0.1)
    if num_panels == 2:
        panels[1].plot(list(hella), list(hella.values()), "o-", color="tab:green", markersize=4, label="HellaSwag")
        panels[1].axhline(0.25, color="gray", linewidth=1, linestyle=":", label="chance")
        panels[1].set_ylabel("acc_norm")
    for panel in panels:
        panel.legend(frameon=False)
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("updates")
    with atomic_write(path) as file:
        figure.savefig(file, format="png")

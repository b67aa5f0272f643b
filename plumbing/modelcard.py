"""The model card of a run: hf/README.md in the form that the Hugging Face hub shows, and the loss curve.

Everything in it comes from the files that the run wrote: run.txt, log.txt, the exported config.json and
model.safetensors, and the meta.json of its shards. What the run did not measure is left out.
"""

import json
import math
import re
from pathlib import Path

from plumbing.files import atomic_write

# meta.json's name of a data set: (name for people, name on the hub or "", language or "")
DATASETS = {
    "fineweb-edu": ("FineWeb-Edu", "HuggingFaceFW/fineweb-edu", "en"),
    "kjj0/finewebedu10B-gpt2": ("FineWeb-Edu", "kjj0/finewebedu10B-gpt2", "en"),
    "HuggingFaceTB/smoltalk": ("SmolTalk", "HuggingFaceTB/smoltalk", "en"),
    "python-docs": ("the documentation that comes with Python", "", "en"),
    "input": ("the author's own text", "", ""),
    "conversations": ("the author's own conversations", "", ""),
}
# settings that say where files are on the author's machine, or how the run was watched
NOT_OF_THE_MODEL = {
    "data",
    "out_dir",
    "init_from",
    "branch_from",
    "resume",
    "device",
    "hellaswag_data",
    "sample_prompt",
    "wandb",
}


def write_model_card(directory, run_folder, step=None, sample=""):
    """Write README.md and curve.png to an export.

    run_folder: the folder of the run, with run.txt and log.txt. step: the number of updates after which the model was
    exported; None: after all of the run's. sample: a text that the model has written.
    """
    starts = read_starts(Path(run_folder, "run.txt"))
    if not starts:
        return
    streams = logged_streams(Path(run_folder, "log.txt"), step)
    facts = collect_facts(directory, starts, streams, step)
    has_curve = write_curve(Path(directory, "curve.png"), streams)
    with atomic_write(Path(directory, "README.md"), "w", encoding="utf-8") as file:
        file.write(card_text(facts, has_curve, sample))


# ----------------------------------------------------------------------------------------------------------
# What the run wrote


def read_starts(path):
    """Return the starts of a run that run.txt describes: dicts of strings, except that "config" is a dict."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    starts = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        fields["config"] = parse_object(fields.get("config", ""))
        if fields["config"]:
            starts.append(fields)
    return starts


def parse_object(text):
    """Return the JSON object in `text`, or {} if there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_object(path):
    """Return the JSON object in a file, or {} if there is none."""
    try:
        return parse_object(Path(path).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def logged_streams(path, step=None):
    """Return {stream: {step: value}} of log.txt, up to the state after `step` updates."""
    streams = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        match = re.fullmatch(r"(\d+) (\S+) (\S+)", line)
        try:
            at, stream, value = int(match[1]), match[2], float(match[3])
        except (TypeError, ValueError):  # a damaged line
            continue
        # an evaluation at step N is of the weights after N updates; a training loss at step N comes before update N + 1
        is_evaluation = stream in ("val", "hella")
        if math.isfinite(value) and (step is None or at < step or (at == step and is_evaluation)):
            streams.setdefault(stream, {})[at] = value
    return streams


def collect_facts(directory, starts, streams, step):
    """Return what the card says, in a dict; a fact that is not known is None or empty."""
    config, first = starts[-1]["config"], starts[0]
    meta = read_object(Path(str(config.get("data", "")), "meta.json"))
    branched = parse_object(first.get("branched", ""))
    if step is None and "train" in streams:
        step = max(streams["train"]) + 1
    has_one_batch_size = not config.get("batch_ramp") and "total_batch_size" not in branched.get("changed", {})
    tokens_per_step = whole_number(config.get("total_batch_size")) if has_one_batch_size else None
    return {
        "config": config,
        "shape": read_object(Path(directory, "config.json")),
        "num_parameters": count_parameters(Path(directory, "model.safetensors")),
        "dataset": DATASETS.get(str(meta.get("dataset")), (None, "", "")),
        "data_tokens": meta.get("tokens"),
        "tokenizer": meta.get("tokenizer"),
        "steps": step,
        "tokens_per_step": tokens_per_step,
        "seconds": training_seconds(tokens_per_step, streams),
        "train_loss": last(streams, "train"),
        "val_loss": last(streams, "val"),
        "hellaswag": last(streams, "hella"),
        "starts": starts,
        "started": first.get("started"),
        "branched": branched,
        "chats": "chat_template" in read_object(Path(directory, "tokenizer_config.json")),
    }


def last(streams, name):
    """Return (step, value) of the newest value of a stream, or None."""
    stream = streams.get(name)
    return (max(stream), stream[max(stream)]) if stream else None


def count_parameters(path):
    """Return how many parameters an exported model has, or None."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    except (OSError, SafetensorError):
        return None


def whole_number(value):
    """Return `value` if it is a positive whole number, else None."""
    return value if type(value) is int and value > 0 else None


def training_seconds(tokens_per_step, streams):
    """Return the time that the run's updates took by the log, or None if it does not have all of them."""
    rates = streams.get("tok/s", {})
    is_complete = rates and min(rates) == 0 and len(rates) == len(streams.get("train", {})) == max(rates) + 1
    if not tokens_per_step or not is_complete or min(rates.values()) <= 0:
        return None
    return sum(tokens_per_step / rate for rate in rates.values())


# ----------------------------------------------------------------------------------------------------------
# The page


def card_text(facts, has_curve, sample):
    """Return README.md: the metadata that the hub reads, then the page."""
    parts = [metadata(facts), introduction(facts), results(facts)]
    if has_curve:
        parts.append("![The loss during training](curve.png)")
    if sample:
        parts.append("## A sample\n\n" + in_fences(sample))
    parts += [usage(facts), training(facts), settings(facts)]
    return "\n\n".join(part for part in parts if part) + "\n"


def metadata(facts):
    """Return the YAML block at the top. The license is the author's to choose."""
    _, hub_name, language = facts["dataset"]
    lines = ["---"]
    if language:
        lines += ["language:", f"- {language}"]
    lines += ["# license: choose one that the training data allow", "library_name: transformers"]
    lines += ["pipeline_tag: text-generation", "tags:", "- gpt2", "- train_gpt2"]
    if hub_name:
        lines += ["datasets:", f"- {hub_name}"]
    base = base_model(facts)
    if base:
        lines.append(f"base_model: openai-community/{base}")
    return "\n".join([*lines, "---"])


def base_model(facts):
    """Return the name of the GPT-2 by OpenAI that the run started from, or ""."""
    source = facts["config"].get("init_from")
    return source if source in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl") else ""


def introduction(facts):
    """Return the title and what the model is."""
    shape, name = facts["shape"], facts["dataset"][0]
    title = "# A GPT-2"
    if facts["num_parameters"]:
        title += f" with {in_words(facts['num_parameters'])} parameters"
    origin = "trained from scratch"
    if base_model(facts):
        origin = f"fine-tuned from OpenAI's {base_model(facts)}"
    elif facts["config"].get("init_from"):
        origin = "trained from the weights of another model"
    text = f"A model of GPT-2's architecture, {origin} with train_gpt2"
    text += f" on {name}." if name else "."
    sizes = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")
    if all(isinstance(shape.get(size), int) for size in sizes):
        text += (
            f" It has {shape['n_layer']} layers, {shape['n_head']} attention heads and {shape['n_embd']} channels, and "
            f"reads up to {shape['n_positions']:,} tokens of a vocabulary of {shape['vocab_size']:,}."
        )
    return f"{title}\n\n{text}"


def results(facts):
    """Return the table of the last losses and scores that the run measured."""
    config = facts["config"]
    rows = []
    if facts["val_loss"]:
        step, loss = facts["val_loss"]
        tokens = whole_number(config.get("val_tokens"))
        on = f" on {tokens:,} tokens that were not trained on" if tokens else ""
        rows.append((f"validation loss{on}", f"{loss:.4f} nats per token", step))
    if facts["train_loss"]:
        step, loss = facts["train_loss"]
        rows.append(("training loss of the last update", f"{loss:.4f} nats per token", step + 1))
    if facts["hellaswag"]:
        step, score = facts["hellaswag"]
        limit = whole_number(config.get("hellaswag_limit"))
        examples = f"the first {limit:,} examples" if limit else "all examples"
        rows.append((f"HellaSwag, {examples} of the validation split, acc_norm (chance: 0.25)", f"{score:.4f}", step))
    if not rows:
        return ""
    lines = ["| measured | value | after updates |", "|---|---|---|"]
    return "\n".join(lines + [f"| {what} | {value} | {step:,} |" for what, value, step in rows])


def in_fences(text):
    """Return a Markdown block that shows `text` as it is."""
    runs = [len(run) for run in re.findall("`+", text)]
    fence = "`" * max(3, max(runs, default=0) + 1)
    return f"{fence}text\n{text.strip()}\n{fence}"


def usage(facts):
    """Return how to load the model."""
    inputs = 'tokenizer("The ", return_tensors="pt")'
    if facts["chats"]:
        inputs = """tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)"""
    return f"""## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or the name of this page on the hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = {inputs}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100, do_sample=True, top_k=50)[0]))
```"""


def training(facts):
    """Return the list of how the model was trained: data, updates, machine, software."""
    starts = facts["starts"]
    items = [describe_data(facts), describe_updates(facts)]
    if facts["branched"]:
        items.append(f"**Branched** from another run after {facts['branched'].get('step')} updates.")
    machines = dict.fromkeys((start.get("machine"), start.get("ranks", "1")) for start in starts)
    for machine, ranks in machines:
        if machine:
            items.append(f"**Machine**: {'1 process' if ranks == '1' else f'{ranks} processes'} on {machine}.")
    if facts["started"]:
        times = f", in {len(starts)} parts" if len(starts) > 1 else ""
        items.append(f"**Started**: {facts['started']}{times}.")
    if starts[-1].get("versions"):
        items.append(f"**Software**: {starts[-1]['versions']}.")
    if starts[-1].get("commit"):
        items.append(f"**Commit** of train_gpt2: `{starts[-1]['commit']}`.")
    return "## How it was trained\n\n" + "\n".join(f"- {item}" for item in items if item)


def describe_data(facts):
    """Return what the model was trained on, or "" if that is not known."""
    name, hub_name, _ = facts["dataset"]
    if not name:
        return ""
    text = f"**Data**: {name}" + (f" ({hub_name})" if hub_name else "")
    if whole_number(facts["data_tokens"]):
        text += f", {facts['data_tokens']:,} tokens of the tokenizer {facts['tokenizer']}"
    return text + "."


def describe_updates(facts):
    """Return how many updates the run made, of how many tokens, in what time; "" if that is not known."""
    steps, tokens_per_step = facts["steps"], facts["tokens_per_step"]
    if not steps:
        return ""
    text = f"**Training**: {steps:,} updates"
    if tokens_per_step:
        text += f" of {tokens_per_step:,} tokens, {steps * tokens_per_step:,} in all"
    if facts["seconds"]:
        rate = steps * tokens_per_step / facts["seconds"]
        text += f", in {in_time(facts['seconds'])} ({rate:,.0f} tokens per second)"
    return text + "."


def settings(facts):
    """Return the run's configuration."""
    config = {name: value for name, value in facts["config"].items() if name not in NOT_OF_THE_MODEL}
    lines = ["<details>", "<summary>All settings of the run</summary>", "", "```json"]
    return "\n".join([*lines, json.dumps(config, indent=2), "```", "", "</details>"])


def in_words(number):
    """Return 454144 as "454K", 124439808 as "124M"."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def in_time(seconds):
    """Return seconds as "12 s", "3.4 minutes" or "5.6 hours"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


# ----------------------------------------------------------------------------------------------------------
# The picture


def write_curve(path, streams):
    """Draw the losses, and HellaSwag if it was measured more than once. Returns whether there is a picture."""
    train, val, hella = (streams.get(name, {}) for name in ("train", "val", "hella"))
    if len(train) < 2:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    num_panels = 2 if len(hella) > 1 else 1
    figure = Figure(figsize=(9, 3.4 * num_panels), layout="constrained", dpi=120)
    panels = figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0]
    draw_losses(panels[0], train, val)
    if num_panels == 2:
        panels[1].plot(list(hella), list(hella.values()), "o-", color="tab:green", markersize=4)
        panels[1].axhline(0.25, color="gray", linewidth=1, linestyle=":")
        panels[1].annotate("chance", (0.99, 0.25), xycoords=("axes fraction", "data"), ha="right", va="bottom")
        panels[1].set_ylim(min(0.2, *hella.values()), max(0.35, *hella.values()) + 0.01)
        panels[1].set_ylabel("HellaSwag acc_norm")
        panels[1].grid(alpha=0.3)
    panels[-1].set_xlabel("updates")
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    return True


def draw_losses(axes, train, val):
    """Draw the training loss, of each update and averaged, and the validation loss."""
    steps, losses = list(train), list(train.values())
    width = max(1, len(losses) // 100)  # average to 100 points
    if width > 1:
        middles = [sum(steps[i : i + width]) / len(steps[i : i + width]) for i in range(0, len(steps), width)]
        means = [sum(losses[i : i + width]) / len(losses[i : i + width]) for i in range(0, len(losses), width)]
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each update")
        axes.plot(middles, means, color="tab:blue", linewidth=1.8, label=f"training, mean of {width} updates")
    else:
        axes.plot(steps, losses, color="tab:blue", linewidth=1.8, label="training")
    if val:
        axes.plot(list(val), list(val.values()), "o-", color="tab:orange", markersize=4, label="validation")
    # the first losses are far above the rest and would flatten the curve
    shown = losses[len(losses) // 50 :] + list(val.values())[1:]
    margin = 0.05 * (max(shown) - min(shown)) or 0.1
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set_ylabel("loss, nats per token")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)

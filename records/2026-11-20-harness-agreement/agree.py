# ran at commit e47e104; modules that it imports have moved since
"""Does hellaswag.py choose the endings that lm-evaluation-harness chooses? Example by example.

    pip install -r requirements.txt "lm_eval[hf]==0.4.13"
    python records/2026-11-20-harness-agreement/agree.py DATA [MODEL] [--limit 300]

DATA is HellaSwag's validation file; where it lacks ctx_a and ctx_b they are put in: ctx_b is what
follows the last sentence. MODEL is a folder in Hugging Face format (a run's hf/); without one a
random GPT-2 with weights large enough for clear choices is made and exported. The harness runs its
own task `hellaswag` on a local copy of the file, text processing included.
"""

import argparse
import glob
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

TASK = """
task: hellaswag_local
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {data}
output_type: multiple_choice
validation_split: validation
test_split: null
process_docs: !function stock.process_docs
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "choices"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def with_parts(example):
    """`example` with ctx_a and ctx_b, by another way than hellaswag.py's regular expression."""
    if "ctx_a" in example:
        return example
    ctx = example["ctx"].rstrip()
    end = max(ctx.rfind(mark + " ") for mark in ".?!")
    if ctx[-1] in ".?!" or end < 0 or ctx[end + 2].isupper():
        return {**example, "ctx_a": ctx, "ctx_b": ""}
    return {**example, "ctx_a": ctx[: end + 1], "ctx_b": ctx[end + 2 :]}


def with_markers(example):
    """`example` with WikiHow's markers put back in, to try the harness' cleaning."""
    first, _, rest = example["ctx_a"].partition(". ")
    endings = ["[substeps] " + ending.replace(". ", ". [step] ", 1) for ending in example["endings"]]
    return {**example, "ctx_a": f"[header] {first} [title] {rest} [step] Then.", "endings": endings}


def random_model(folder):
    import torch

    import tokenizer
    from plumbing.huggingface import export_huggingface
    from train_gpt2 import GPT, GPTConfig

    torch.manual_seed(1)
    model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128))
    for parameter in model.parameters():
        parameter.data.mul_(3)
    export_huggingface(model, tokenizer.get_encoding("gpt2"), folder)


def run(*command):
    print("$", *command, flush=True)
    done = subprocess.run([sys.executable, *map(str, command[1:])], capture_output=True, text=True, cwd=ROOT)
    print(done.stdout.strip(), flush=True)
    if done.returncode:
        sys.exit(done.stderr[-4000:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--limit", type=int, default=300)
    arguments = parser.parse_args()
    packages = ("lm_eval", "transformers", "torch", "tiktoken")
    print("versions:", ", ".join(f"{name} {version(name)}" for name in packages))

    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        with open(arguments.data, encoding="utf-8") as file:
            examples = [with_parts(json.loads(line)) for line in file]
        data = work / "hellaswag_val.jsonl"
        data.write_text("".join(json.dumps(example) + "\n" for example in examples))
        (work / "hellaswag_local.yaml").write_text(TASK.format(data=data))
        (work / "stock.py").write_text("from lm_eval.tasks.hellaswag.utils import process_docs  # unchanged\n")
        model = arguments.model.resolve() if arguments.model else work / "hf"
        if not arguments.model:
            random_model(model)

        # the text, on all examples, as they are and with markers
        import datasets

        datasets.disable_progress_bars()
        from lm_eval.tasks.hellaswag.utils import process_docs

        import hellaswag

        for name, variant in (("as they are", lambda e: e), ("with markers", with_markers)):
            texts = [variant(example) for example in examples]
            theirs = process_docs(datasets.Dataset.from_list(texts))
            equal = sum(
                hellaswag.harness_text(text) == (their["query"], their["choices"]) for text, their in zip(texts, theirs)
            )
            print(f"text: {equal} of {len(texts)} examples equal, {name}")
        lacking = [{key: example[key] for key in ("activity_label", "ctx", "endings")} for example in examples]
        equal = sum(hellaswag.harness_text(a) == hellaswag.harness_text(b) for a, b in zip(examples, lacking))
        print(f"text: {equal} of {len(examples)} examples equal when ctx_a and ctx_b are derived from ctx")

        # the choices, on the first so many
        run("python", "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--tasks",
            "hellaswag_local", "--include_path", work, "--device", "cpu", "--batch_size", "8", "--limit",
            arguments.limit, "--log_samples", "--output_path", work / "out")  # fmt: skip
        run("python", "hellaswag.py", "-m", model, "-d", "cpu", "--data", data, "--limit", arguments.limit,
            "--predictions", work / "ours.jsonl")  # fmt: skip

        [samples] = glob.glob(str(work / "out" / "**" / "samples_*.jsonl"), recursive=True)
        with open(samples) as file:
            theirs = {sample["doc"]["ind"]: sample for sample in map(json.loads, file)}
        with open(work / "ours.jsonl") as file:
            ours = [json.loads(line) for line in file]
        from train_gpt2 import load_model

        gpt, enc = load_model(str(model))
        rendered = [hellaswag.render_example(example, enc, harness=True) for example in examples[: arguments.limit]]
        total, *_ = hellaswag.score(gpt, rendered, enc.n_vocab)
    logs = np.array([[float(resp[0]) for resp in theirs[line["ind"]]["filtered_resps"]] for line in ours])
    characters = np.array([[len(choice) for choice in theirs[line["ind"]]["doc"]["choices"]] for line in ours])
    acc = sum(line["harness_pred"] == pick for line, pick in zip(ours, logs.argmax(1)))
    acc_norm = sum(line["harness_pred_norm"] == pick for line, pick in zip(ours, (logs / characters).argmax(1)))
    right = [
        (line["harness_pred"] == line["label"]) == theirs[line["ind"]]["acc"]
        and (line["harness_pred_norm"] == line["label"]) == theirs[line["ind"]]["acc_norm"]
        for line in ours
    ]
    difference = abs(total - logs).max()
    print(f"log-likelihoods: largest difference {difference:.2e} among {logs.size} sums near {logs.mean():.0f}")
    print(f"predictions equal: acc {acc} of {len(ours)}, acc_norm {acc_norm} of {len(ours)}")
    print(f"examples that both count alike, right or wrong, by both rules: {sum(right)} of {len(ours)}")


if __name__ == "__main__":
    main()

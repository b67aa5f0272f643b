"""Malformed checkpoints, shards, logs and folders, each given to the commands that read it.

    python tests/fuzz.py > log.txt

Each attempt must end in one line `error: ...` and status 2, or in the result that the intact file gives, within
10 seconds of computing and 1 GiB of memory above what the intact file needs. The short form is in test_attacks.py.
"""

import io
import json
import pickle
import random
import resource
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from conftest import finish, make_shards, read_log, start, tiny_flags

import sample
import train_gpt2

OPTIONS = dict(max_steps=6, checkpoint_every=2, keep_checkpoints=3, val_every=3)
SECONDS, BYTES = 10, 2**30  # that an attempt may take; bytes above what the intact file takes
LIMIT = 2**33  # bytes of address space, so that an attempt that goes wrong does not take the machine with it

# ----------------------------------------------------------------------------------------------------------
# Checkpoints. Each damage gets the dict of an intact one, changes it in place or returns something else to be saved:
# another object, or the bytes of a file.

DAMAGES = {}


def damage(name):
    def add(function):
        assert name not in DAMAGES
        DAMAGES[name] = function
        return function

    return add


def saved(content, **options):
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def rezipped(content, change, compression=zipfile.ZIP_STORED):
    """The file of `content` with change(name, bytes) for the bytes of each of its parts; None leaves a part out."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(content))) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            part = change(name, old.read(name))
            if part is not None:
                new.writestr(name, part)
    return file.getvalue()


def with_pickle(content, pickled):
    """The file of `content` whose pickle is `pickled`, protocol 2 as torch has it."""
    return rezipped(content, lambda name, part: pickled if name.endswith("data.pkl") else part)


class Touch:
    """An object whose unpickling makes a file."""

    def __reduce__(self):
        return Path.touch, (Path("touched"),)


def set_item(*path):
    """A damage that sets an entry deep in the dict: set_item("config", "n_layer", 10**6)."""
    *names, last, value = path

    def change(c):
        for name in names:
            c = c[name]
        c[last] = value() if callable(value) else value

    return change


def set_tensor(function):
    """A damage that changes one weight and one of the optimizer's averages by function(tensor)."""

    def change(c):
        weights, state = c["model"], c["optimizer"][0]["state"][3]
        name = "transformer.h.0.attn.c_attn.weight"
        weights[name], state["exp_avg"] = function(weights[name]), function(state["exp_avg"])

    return change


def flipped(seed):
    def change(c):
        content = bytearray(saved(c))
        content[random.Random(seed).randrange(len(content))] ^= 1 << seed % 8
        return bytes(content)

    return change


def nested(depth):
    content = []
    for _ in range(depth):
        content = [content]
    return content


def endless():
    content = {}
    content["itself"] = content
    return content


WTE = "transformer.wte.weight"
FIRST = ("optimizer", 0, "state", 0)  # the state of the embedding
DAMAGES |= {
    "an empty file": lambda c: b"",
    "one byte": lambda c: b"P",
    "half a file": lambda c: saved(c)[: len(saved(c)) // 2],
    "the last 100 bytes cut": lambda c: saved(c)[:-100],
    "the second half zeroed": lambda c: saved(c)[: len(saved(c)) // 2].ljust(len(saved(c)), b"\0"),
    "zeros": lambda c: bytes(10_000),
    "text": lambda c: b"To be, or not to be\n" * 100,
    "noise": lambda c: random.Random(0).randbytes(10_000),
    "noise that begins like an archive": lambda c: b"PK\3\4" + random.Random(0).randbytes(10_000),
    **{f"a bit flipped, place {seed}": flipped(seed) for seed in range(12)},
    "the old format": lambda c: saved(c, _use_new_zipfile_serialization=False),
    "the old format of a huge bytearray": lambda c: b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\2\x85R.",
    "a plain pickle": lambda c: pickle.dumps({"model": {}}),
    "code in a plain pickle": lambda c: pickle.dumps(Touch()),
    "code in an archive": set_item("val_loss", Touch),
    "an archive without its tensors": lambda c: rezipped(c, lambda name, part: None if "/data/" in name else part),
    "an archive with shorter tensors": lambda c: rezipped(c, lambda name, part: part[:8] if "/data/" in name else part),
    "an archive without its pickle": lambda c: rezipped(c, lambda name, part: None if name.endswith("pkl") else part),
    "a compressed archive of 1.5 GiB": lambda c: rezipped(
        c, lambda name, part: bytes(3 * 2**29) if name.endswith("data/0") else part, zipfile.ZIP_DEFLATED
    ),
    "a huge bytearray": lambda c: with_pickle(c, b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\2\x85R."),
    "a huge empty tensor": lambda c: with_pickle(c, b"\x80\x02ctorch\nFloatTensor\n\x8a\x05\0\0\0\0\2\x85R."),
    "lists two hundred deep": lambda c: {**c, "optimizer": nested(200)},
    "a loader that contains itself": set_item("loader", endless),
    "a tensor": lambda c: torch.zeros(3),
    "a list": lambda c: [c],
    "nothing": lambda c: (None,)[0] or [],
    "bare weights": lambda c: c["model"],
    **{
        f"no {name}": lambda c, name=name: c.pop(name) and None
        for name in ("optimizer", "config", "step", "loader", "tokenizer_file", "scaler", "val_loss")
    },
    "no model": lambda c: {name: value for name, value in c.items() if name != "model"},
    "no rng": lambda c: {name: value for name, value in c.items() if name != "rng"},
    "weights in a list": lambda c: c | {"model": list(c["model"].values())},
    "optimizers in a dict": lambda c: c | {"optimizer": dict(enumerate(c["optimizer"]))},
    "settings in a list": lambda c: c | {"config": list(c["config"].items())},
    "a step of text": set_item("step", "4"),
    "a step of 4.5": set_item("step", 4.5),
    "a negative step": set_item("step", -1),
    "a step that is true": set_item("step", True),
    "a step of 600 digits": set_item("step", 10**600),
    "a step beyond the end": set_item("step", 1000),
    "a loader in a list": set_item("loader", [1, 2]),
    "a loader without its position": lambda c: c["loader"].pop("position") and None,
    "a negative position": set_item("loader", "position", -8),
    "a position of 2**62": set_item("loader", "position", 2**62),
    "a position of 600 digits": set_item("loader", "position", 10**600),
    "a position of text": set_item("loader", "position", "32"),
    "other data": set_item("loader", "num_windows", 7),
    "a fingerprint that is a number": set_item("loader", "fingerprint", 5),
    "a fingerprint of other data": set_item("loader", "fingerprint", "0" * 64),
    "a short random state": set_item("rng", lambda: torch.zeros(3, dtype=torch.uint8)),
    "a random state of noise": set_item("rng", lambda: torch.full((5056,), 255, dtype=torch.uint8)),
    "a scaler that is a list": set_item("scaler", [1.0]),
    "half a tokenizer": lambda c: c | {"tokenizer_file": c["tokenizer_file"][: len(c["tokenizer_file"]) // 2]},
    "a tokenizer of bytes": lambda c: c | {"tokenizer_file": c["tokenizer_file"].encode()},
    "a tokenizer that is not one": set_item("tokenizer_file", '{"name": 3}'),
    "a tokenizer with negative ids": lambda c: c | {"tokenizer_file": c["tokenizer_file"].replace(" 100\n", " -1\n")},
    "a tokenizer named like a path": lambda c: (
        c | {"tokenizer_file": c["tokenizer_file"].replace('"bytes"', '"../../touched"')}
    ),
    "a validation loss that is a list": set_item("val_loss", [[1]] * 9),
    # settings
    **{f"{name} as text": set_item("config", name, "2") for name in ("n_layer", "n_head", "n_embd", "vocab_size")},
    "n_layer missing": lambda c: c["config"].pop("n_layer") and None,
    "n_layer as a tensor": set_item("config", "n_layer", lambda: torch.tensor([2, 2])),
    "n_layer 10**6": set_item("config", "n_layer", 10**6),
    "n_layer of 600 digits": set_item("config", "n_layer", 10**600),
    "n_layer 1": set_item("config", "n_layer", 1),
    "vocab_size 2**40": set_item("config", "vocab_size", 2**40),
    "block_size 2**40": set_item("config", "block_size", 2**40),
    "n_embd 0": set_item("config", "n_embd", 0),
    "n_embd 2**31": set_item("config", "n_embd", 2**31),
    "n_head -1": set_item("config", "n_head", -1),
    "n_head 3": set_item("config", "n_head", 3),
    # weights and the optimizer's state
    "a weight missing": lambda c: c["model"].popitem() and None,
    "a weight too many": set_item("model", "transformer.extra", lambda: torch.zeros(3)),
    "a weight that is a list": set_item("model", WTE, [1.0, 2.0]),
    "a weight named by a number": set_item("model", 3, lambda: torch.zeros(3)),
    "an embedding of another shape": set_item("model", WTE, lambda: torch.zeros(320, 64)),
    "an output layer of its own": lambda c: set_item("model", "lm_head.weight", c["model"][WTE] + 1)(c),
    "a vocabulary of 2**40 rows in one": lambda c: (
        (
            set_item("config", "vocab_size", 2**40)(c),
            set_item("model", WTE, torch.zeros(1, 32).expand(2**40, 32))(c),
            set_item("model", "lm_head.weight", c["model"][WTE])(c),
        )
        and None
    ),
    "tensors of integers": set_tensor(lambda t: t.int()),
    "tensors of complex numbers": set_tensor(lambda t: t + 0j),
    "tensors that are cut": set_tensor(lambda t: t[:-1].clone()),
    "tensors of another shape and as many numbers": set_tensor(lambda t: t.T.contiguous()),
    "tensors with another stride": set_tensor(lambda t: t.T.contiguous().T),
    "tensors of one number": set_tensor(lambda t: torch.zeros(1, 1).expand(t.shape)),
    "tensors whose rows overlap": set_tensor(lambda t: t.flatten()[: sum(t.shape)].clone().as_strided(t.shape, (1, 1))),
    "tensors with not a number": set_tensor(lambda t: t / 0 * 0),
    "tensors with infinity": set_tensor(lambda t: t + np.inf),
    "sparse tensors": set_tensor(lambda t: t.to_sparse()),
    "quantized tensors": set_tensor(lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)),
    "tensors without content": set_tensor(lambda t: t.to("meta")),
    "parameters in place of tensors": set_tensor(lambda t: torch.nn.Parameter(t)),
    "two weights in one place": lambda c: c["model"].update(
        {"transformer.h.0.ln_1.weight": c["model"]["transformer.h.1.ln_1.weight"]}
    ),
    "a step count that is not a number": set_item(*FIRST, "step", lambda: torch.tensor(np.nan)),
    "a negative step count": set_item(*FIRST, "step", lambda: torch.tensor(-3.0)),
    "a step count of a billion": set_item(*FIRST, "step", lambda: torch.tensor(1e9)),
    "a step count that is a number": set_item(*FIRST, "step", 4.0),
    "averages that are negative squares": lambda c: set_item(
        *FIRST, "exp_avg_sq", -c["optimizer"][0]["state"][0]["exp_avg_sq"].abs() - 1
    )(c),
    "averages in one place": lambda c: set_item(*FIRST, "exp_avg", c["optimizer"][0]["state"][0]["exp_avg_sq"])(c),
    "averages of another parameter": lambda c: c["optimizer"][0]["state"].update({0: c["optimizer"][0]["state"][1]}),
    "states of one parameter too few": lambda c: c["optimizer"][0]["state"].pop(0) and None,
    "states of one parameter too many": set_item("optimizer", 0, "state", 999, {}),
    "states in a list": lambda c: set_item("optimizer", 0, "state", list(c["optimizer"][0]["state"].values()))(c),
    "an optimizer that is a number": set_item("optimizer", 0, 5),
    "no optimizers": set_item("optimizer", []),
}
# only resuming reads what these change, and what they leave is right for the others or is refused there, too
ONLY_RESUMED = {
    "a setting of another run": set_item("config", "max_lr", 1.0),
    "a setting that is not a number": set_item("config", "max_lr", np.nan),
    "a setting of another type": set_item("config", "seed", "1337"),
    "a setting that is a tensor": set_item("config", "seed", lambda: torch.tensor([1, 2])),
    "a setting that nobody knows": set_item("config", "label_smoothing", 0.1),
    "n_head 4": set_item("config", "n_head", 4),
    "tensors of float16": set_tensor(lambda t: t.half()),  # weights to start from may be stored in half precision
}


def write_damaged(damage, intact, path):
    """Write the checkpoint at `intact` to `path` with that damage."""
    content = torch.load(intact, weights_only=True)
    changed = damage(content)
    content = content if changed is None else changed
    path.write_bytes(content if isinstance(content, bytes) else saved(content))


# ----------------------------------------------------------------------------------------------------------
# Folders: of data, and of the run that continues. Each damage changes files in a folder with data/ and run/.

META_TEXTS = {
    "an empty meta.json": "",
    "a torn one": '{"tokenizer": "by',
    "a list": "[]",
    "nothing": "null",
    "a number": "1e999",
    "brackets without end": "[" * 100_000,
    "no keys": "{}",
    "a byte order mark": "\ufeff{}",
}
META_CHANGES = {
    "tokenizer": [3, "", "../../touched", "no-such-tokenizer", "gpt2\0", ["bytes"]],
    "shards": [{}, [], {"../x.npy": 3}, {"tiny_train_000001.npy": "3000"}, {"tiny_train_000001.npy": -1}, None],
    "complete": [False, "yes", 1],
    "vocab_size": ["257"],
    "dataset": [None],
    "ends": [{"x": 3}, {"x": [1]}],
    "made_from": [[], {"sources": 3}],
}
LOG_LINES = [
    "\n\n",
    "4 val nan\n",
    "\0" * 100 + "\n",
    "\udce9\n",
    "0 train 1e999\n",
    "9" * 5000 + " train 1\n",
    "x\u2028y\n",
    "0 val -1e-400\n",
    "\u0663 train 1\n",
    "5 tra\n",
    "3 val 1 2 3\n",
    "3 val\n",
]
SHARD = "tiny_train_000002.npy"


def folder_damages():
    """{name: function(folder)}"""
    damages = {}
    for name, text in META_TEXTS.items():
        damages[f"meta.json: {name}"] = lambda folder, text=text: (folder / "data/meta.json").write_text(text, "utf-8")
    for key, values in META_CHANGES.items():
        for value in values:

            def change_meta(folder, key=key, value=value):
                path = folder / "data" / "meta.json"
                path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

            damages[f"meta.json: {key} is {value!r}"] = change_meta
    tokens = np.full(1700, 97, np.uint16)
    arrays = {
        "of int64": tokens.astype(np.int64),
        "of big-endian numbers": tokens.astype(">u2"),
        "of two dimensions": tokens.reshape(17, 100),
        "of objects": np.array([{}] * 9, object),
        "of records": np.zeros(9, "u2,u2"),
        "of ids too large": tokens + 9999,
        "too short": tokens[:-5],
        "of one number": np.uint16(3),
        "empty": tokens[:0],
        "of other tokens": tokens,
    }
    for name, array in arrays.items():
        damages[f"a shard {name}"] = lambda folder, array=array: np.save(folder / "data" / SHARD, array)
    for seed in range(10):

        def flip_header(folder, seed=seed):
            path, place = folder / "data" / SHARD, random.Random(seed).randrange(80)
            content = bytearray(path.read_bytes())
            content[place] ^= 1 << seed % 8
            path.write_bytes(content)

        damages[f"a shard's header with a bit flipped, place {seed}"] = flip_header
    for size in (0, 5, 60, 1000):
        damages[f"a shard cut to {size} bytes"] = lambda folder, size=size: cut(folder / "data" / SHARD, size)
    for line in LOG_LINES:

        def add_to_log(folder, line=line):
            path = folder / "run" / "log.txt"
            path.write_bytes(line.encode(errors="surrogateescape") + path.read_bytes())

        damages[f"log.txt with {line[:20]!r}"] = add_to_log
    return damages | FOLDER_DAMAGES


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def replace(path, make):
    """A damage that replaces a file or folder by what make(path) makes."""

    def change(folder):
        target = folder / path
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        make(target)

    return change


def dangle(path):
    path.symlink_to("nowhere")


def foreign_model(path):
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"dear")


def foreign_file(path):
    path.write_bytes(b"dear")


FOLDER_DAMAGES = {
    "a shard that is a folder": replace(f"data/{SHARD}", Path.mkdir),
    "a shard that leads nowhere": replace(f"data/{SHARD}", dangle),
    "a meta.json that is a folder": replace("data/meta.json", Path.mkdir),
    "a run that is a file": replace("run", foreign_file),
    "a run that leads nowhere": replace("run", dangle),
    "a run.txt that is a folder": replace("run/run.txt", Path.mkdir),
    "a run.txt of noise": replace("run/run.txt", lambda path: path.write_bytes(random.Random(0).randbytes(999))),
    "a run.txt with a config of another kind": replace("run/run.txt", lambda path: path.write_text("config: []\n")),
    "no run.txt": replace("run/run.txt", lambda path: None),
    "a log.txt that is a folder": replace("run/log.txt", Path.mkdir),
    "a checkpoint that is a folder": replace("run/model_00004.pt", Path.mkdir),
    "a checkpoint that leads nowhere": replace("run/model_00004.pt", dangle),
    "a checkpoint with odd digits": replace("run/model_\u00b2\u00b2\u00b2\u00b2\u00b2.pt", foreign_file),
    "a model of somebody else": replace("run/hf", foreign_model),
    "a file called hf": replace("run/hf", foreign_file),
    "a file called hf.part": replace("run/hf.part", foreign_file),
    "foreign parts": replace("run/film.part", foreign_file),
}

# ----------------------------------------------------------------------------------------------------------
# Attempts


class Attempt(NamedTuple):
    name: str
    status: int
    text: str  # all that was printed
    result: object  # what the command has made: losses, or the text of a sample
    seconds: float  # of computing
    peak: int  # bytes of memory


def measured(main, args, report):
    """Run main(args) in this process and write to `report` what it has cost."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    try:
        main(args)
    finally:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        Path(report).write_text(json.dumps([time.process_time(), peak]))


def make_good(folder):
    """A folder with data/, run/ (steps 2 and 4 of 6 are done) and log.txt, what the run must come to."""
    make_shards(folder / "data")
    args = tiny_flags(folder / "data", folder / "run", **OPTIONS)
    assert finish(start(train_gpt2.main, args, output=folder / "output")) == [0], (folder / "output").read_text()
    shutil.copy(folder / "run" / "log.txt", folder / "log.txt")
    (folder / "run" / "model_00006.pt").unlink()
    shutil.rmtree(folder / "run" / "hf")
    return folder


def attempt(command, folder, name, checkpoint=None):
    """Run one command in `folder`, in a process of its own."""
    report, output = folder / "report", folder / "output"
    out_dir = folder / ("run" if command == "resume" else "new")
    if command == "sample":
        main, args = sample.main, ["abc", "-m", str(checkpoint), "--max-new-tokens", "8", "--temperature", "0"]
    else:
        init_from = {"init_from": checkpoint} if command == "init" else {}
        main, args = train_gpt2.main, tiny_flags(folder / "data", out_dir, **OPTIONS, **init_from)
    try:
        (status,) = finish(start(measured, main, args, report, output=output))
    except AssertionError:  # it has not ended by itself
        status = None
    text = output.read_text(errors="replace")
    seconds, peak = json.loads(report.read_text()) if report.exists() else (0, 0)
    result = text if command == "sample" else None
    if command != "sample" and status == 0:
        result = read_log(out_dir), read_log(out_dir, "val")
    return Attempt(name, status, text, result, seconds, peak)


def verdict(attempt, intact):
    """ "refused", "right", or what is wrong with an attempt, which `intact` is the attempt without damage of."""
    errors = [line for line in attempt.text.splitlines() if line.startswith("error: ")]
    if attempt.seconds > SECONDS:
        return f"WRONG: it took {attempt.seconds:.1f} s"
    if attempt.peak > intact.peak + BYTES:
        return f"WRONG: it took {attempt.peak / 2**30:.1f} GiB"
    if "Traceback" in attempt.text or attempt.status not in (0, 2):
        return f"WRONG: status {attempt.status}: {attempt.text.strip().splitlines()[-1:]}"
    if attempt.status == 2:
        return "refused" if len(errors) == 1 else f"WRONG: {len(errors)} lines"
    return "right" if attempt.result == intact.result else "WRONG: another result, without a word"


def try_checkpoints(good, place, names):
    """Yield (name, command, verdict, attempt) for each damage of `names` by each command that reads checkpoints."""
    intact_path = good / "run" / "model_00004.pt"
    intact = {}
    for command in ("resume", "init", "sample"):
        folder = shutil.copytree(good, place / f"intact-{command}")
        intact[command] = attempt(command, folder, "intact", folder / "run" / "model_00004.pt")
        assert intact[command].status == 0, intact[command].text
    damages = DAMAGES | ONLY_RESUMED
    for number, name in enumerate(names):
        path = place / "bad.pt"
        write_damaged(damages[name], intact_path, path)
        for command in ("resume",) if name in ONLY_RESUMED else ("resume", "init", "sample"):
            folder = shutil.copytree(good, place / f"{number}-{command}")
            bad = folder / "run" / "model_00004.pt" if command == "resume" else folder / "bad.pt"
            shutil.copy(path, bad)
            result = attempt(command, folder, name, bad)
            yield name, command, verdict(result, intact[command]), result
            shutil.rmtree(folder)


def try_folders(good, place, names):
    """The same for damages of data and run folders, by resuming."""
    place.mkdir(exist_ok=True)
    folder = shutil.copytree(good, place / "intact")
    intact = attempt("resume", folder, "intact")
    assert intact.status == 0, intact.text
    damages = folder_damages()
    for number, name in enumerate(names):
        folder = shutil.copytree(good, place / str(number))
        damages[name](folder)
        dear = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes() == b"dear"]
        result = attempt("resume", folder, name)
        lost = [path.name for path in dear if not path.exists()]
        yield name, "resume", f"WRONG: {lost} is gone" if lost else verdict(result, intact), result
        shutil.rmtree(folder)


def main():
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        good = make_good(place / "good")
        counts = {}
        for kind, attempts in (
            ("checkpoints", try_checkpoints(good, place / "checkpoints", [*DAMAGES, *ONLY_RESUMED])),
            ("folders", try_folders(good, place / "folders", list(folder_damages()))),
        ):
            print(f"# {kind}")
            for name, command, found, one in attempts:
                line = next((line for line in one.text.splitlines() if line.startswith("error: ")), "")
                line = line.replace(str(place), "DIR")[:200]
                print(
                    f"{command:6} | {name} | {found} | {one.seconds:.1f} s | {one.peak / 2**20:.0f} MiB | {line}",
                    flush=True,
                )
                outcome = found.split(":")[0]
                counts[kind, outcome] = counts.get((kind, outcome), 0) + 1
        for (kind, outcome), count in counts.items():
            print(f"{kind}: {count} {outcome}")
        sys.exit(any(outcome == "WRONG" for _, outcome in counts))


if __name__ == "__main__":
    main()

"""The settings of a run besides its recipe. The class of a setting says when it may change.

    Recipe (in the trainer)  stays the same for the whole run and on all ranks; only a branch may change it
    RunOptions               may change at every start; keeps its value if it is not typed
    StartOptions             is for one start and is never inherited

PER_NODE marks a setting that each node may set differently, such as a path or a device.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from plumbing.cli import flags
from plumbing.cli.flags import Positive
from plumbing.run import source_code

PER_NODE = "per node"


@dataclasses.dataclass(frozen=True)
class StartOptions:
    """The settings of one start of a run."""

    # the run's folder and device
    out_dir: Annotated[str, PER_NODE] = "log"  # folder of the run
    resume: bool = True  # resume the run in out_dir; --no-resume moves it aside
    dry_run: bool = False  # print what the run will do and cost, then end; write nothing
    gpus: int = 0  # with --dry-run: the number of GPUs to ask about, on any machine
    gpu_memory: float = 0.0  # with --dry-run: the memory of each in GB, 80 for example
    device: Annotated[str, PER_NODE] = "auto"  # cpu, cuda or mps; auto: best available


@dataclasses.dataclass(frozen=True)
class RunOptions(StartOptions):
    """Where the data is, how a run uses the machine, and how often it evaluates, saves and prints."""

    # data folders, speed and memory
    data: Annotated[tuple[str, ...], PER_NODE] = ("edu_fineweb10B",)  # folders of token shards
    compile: bool | None = None  # torch.compile the model; by default on CUDA only
    activation_checkpointing: bool = False  # recompute activations: less memory, slower
    # FSDP: each rank keeps only its share of weights, gradients and optimizer state, for a model larger than a GPU
    shard: bool = False
    # B: maximum number of sequences per rank and micro-step; lowered until they fit in memory
    batch_size: Positive[int] = 64
    # evaluation and output, every N steps and after the last one; 0: never
    val_every: int = 250  # steps between validations
    hellaswag_every: int = 250  # steps between HellaSwag scores
    hellaswag_limit: int = 0  # examples to score; 0: all
    # HellaSwag's examples; downloaded if missing
    hellaswag_data: Annotated[str, PER_NODE] = "hellaswag/hellaswag_val.jsonl"
    sample_every: int = 250  # steps between samples
    # text that the samples continue
    sample_prompt: Annotated[str, "may be empty"] = "Hello, I'm a language model,"
    checkpoint_every: int = 500  # steps between checkpoints; 0: only at the end
    keep_checkpoints: Positive[int] = 2  # number of newest checkpoints to keep
    milestone_every: int = 0  # steps between checkpoints that are never deleted
    keep_best: bool = False  # keep the weights with the lowest validation loss as model_best.pt
    wandb: Annotated[str, "may be empty"] = ""  # Weights & Biases project that gets a copy of the log


def names_of(options_class: type) -> set[str]:
    """The settings of a class, including inherited ones."""
    return {field.name for field in dataclasses.fields(options_class)}


def per_node_names(config_class: type) -> set[str]:
    """The settings that each node may set differently."""
    fields = dataclasses.fields(config_class)
    return {field.name for field in fields if PER_NODE in flags.kind_of(field)[1]}


def inheritable(config_class: type, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that a start inherits from a run, a parent or a model: all except the StartOptions."""
    names = names_of(config_class) - names_of(StartOptions)
    return {name: value for name, value in settings.items() if name in names}


def changed_settings(then: dict[str, Any], config: Any) -> dict[str, tuple[Any, Any]]:
    """{name: (then, now)} for each setting of the recipe that differs between a checkpoint and `config`."""
    now = vars(config)
    defaults = vars(type(config)())
    kept = names_of(RunOptions)
    changed = {}
    for name in dict.fromkeys([*then, *now]):
        # a setting that did not exist then had its default; one that is gone is unknown now
        before = then.get(name, defaults.get(name))
        after = now.get(name, "unknown")
        is_equal = str(before).rstrip("/") == str(after).rstrip("/")  # "log/" is the folder "log"
        if name not in kept and not is_equal:
            changed[name] = before, after
    return changed


def read_flags(
    config_class: type, presets: Mapping[str, Any], args: Sequence[str] | None = None
) -> dict[str, Any]:
    """The typed settings, {name: value}. --help shows the defaults of the typed preset.

    args: the words to read instead of the command line.
    """
    # now, because the file may change in the seconds that importing torch takes
    source_code.source_of(config_class)
    words = None if args is None else [str(arg) for arg in args]
    return flags.read(config_class, words, presets=presets, synonyms=OTHER_TRAINERS)


# the trainer's flags, and the names that nanoGPT, llm.c, transformers and others give to the same settings
OTHER_TRAINERS = {
    "--data": "dataset dataset-name data-dir data-path input-bin",
    "--shard": "fsdp",
    "--hellaswag-every 0": "no-hellaswag",
    "--init-from": "model model-name-or-path checkpoint",
    "To continue a run, repeat its command; --branch-from does so in a new folder.": "resume-from-checkpoint",
    "--dtype": "bf16 fp16 fp32",
    "--batch-size": "per-device-train-batch-size device-batch-size micro-batch-size",
    "--sequence-length": "seq-len max-seq-len context-length",
    "--total-batch-size, which counts tokens": "gradient-accumulation-steps",
    "--max-steps": "max-iters num-iterations iterations lr-decay-iters",
    "--max-steps 0": "eval-only",
    "There are no config files: --preset names a set of flags, and a shell script can keep your own.": "config",
    "--wandb, or plot log.txt with play.ipynb": "tensorboard report-to",
    "--passes": "num-train-epochs num-epochs epochs",
    "--tokens-per-parameter": "target-param-data-ratio",
    "--max-lr": "learning-rate lr",
    "--val-every": "eval-interval eval-every eval-steps val-loss-every",
    "--val-tokens": "eval-iters",
    "--checkpoint-every": "save-steps save-every always-save-checkpoint",
    "torchrun --nproc-per-node=N": "num-gpus nproc-per-node num-processes",
    "torch.distributed.launch adds it: start the ranks with torchrun instead.": "local-rank",
    "log.txt, which has every step": "log-interval logging-steps",
    "The model has no dropout: in pretraining it sees most texts once.": "dropout",
}

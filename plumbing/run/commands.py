"""The commands that a run prints. Each works as printed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plumbing.cli.console import print_next
from plumbing.cli.flags import flag_of
from plumbing.data.tokenizers import has_chat_tokens
from plumbing.run import source_code
from plumbing.system.distributed import environment_number

Command = list[Any]  # words, and tuples (flag, value, ...), for print_next


def launcher() -> list[str]:
    """The words of the command that started this process, up to the script."""
    local_ranks = environment_number("LOCAL_WORLD_SIZE", 0)
    if not local_ranks:
        return ["python"]
    ranks = environment_number("WORLD_SIZE", 0)
    nodes = ["--standalone"]
    if local_ranks != ranks:  # without an endpoint, each node would wait for itself
        endpoint = f"--rdzv-endpoint={os.environ.get('MASTER_ADDR', 'HOST')}:29500"
        nodes = [f"--nnodes={ranks // local_ranks}", "--rdzv-backend=c10d", endpoint]
    return ["torchrun", *nodes, f"--nproc-per-node={local_ranks}"]


def training_command(config_class: type, settings: Mapping[str, Any]) -> Command:
    """The command that trains with these settings, {name: value}."""
    command: Command = [*launcher(), os.path.relpath(source_code.file_of(config_class))]
    for name, value in settings.items():
        flag = flag_of(name)
        if value is False:
            command.append(f"--no-{flag[2:]}")
        elif value is True:
            command.append(flag)
        elif isinstance(value, tuple):
            command.append((flag, *value))
        else:
            command.append((flag, value))
    return command


def sample_command(source: str, enc: Any, prompt: str, *, code: Path | None = None) -> Command:
    """The command that continues a prompt, or chats, with the model in `source`. code: the model's trainer."""
    flags: Command = [("-m", source)]
    if code and code.name != source_code.NAME:
        flags.append(("--code", os.path.relpath(code)))
    if has_chat_tokens(enc):
        return ["python", "sample.py", "--chat", *flags]
    if not prompt or prompt.startswith("-"):
        prompt = "The"  # without a blank at the end: GPT-2's tokens begin with the one before a word
    return ["python", "sample.py", prompt, *flags]


def print_next_command(config: Any, enc: Any) -> None:
    """Print the command to run after training: it samples from the model."""
    print_next(sample_command(config.out_dir, enc, config.sample_prompt, code=source_code.file_of(type(config))))

"""The commands that a run prints: what was typed, again or with changes, so that it works as printed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plumbing.cli.console import print_next
from plumbing.cli.flags import flag_of
from plumbing.data.tokenizers import has_chat_tokens
from plumbing.run import source_code
from plumbing.system.distributed import environment_number


def launcher() -> list[str]:
    """The words of the command that started this process, up to the script."""
    local_ranks, ranks = environment_number("LOCAL_WORLD_SIZE", 0), environment_number("WORLD_SIZE", 0)
    if not local_ranks:
        return ["python"]
    nodes = ["--standalone"]
    if local_ranks != ranks:  # without an endpoint, each node would wait for itself
        endpoint = f"--rdzv-endpoint={os.environ.get('MASTER_ADDR', 'HOST')}:29500"
        nodes = [f"--nnodes={ranks // local_ranks}", "--rdzv-backend=c10d", endpoint]
    return ["torchrun", *nodes, f"--nproc_per_node={local_ranks}"]


def train_command(config_class: type, settings: Mapping[str, Any]) -> list[Any]:
    """The command that types these settings, {name: value}, in words and groups of words as print_next takes them."""
    flags: list[Any] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            flags.append(flag_of(name) if value else f"--no-{flag_of(name)[2:]}")
        else:
            flags.append((flag_of(name), *(value if isinstance(value, tuple) else [value])))
    return [*launcher(), os.path.relpath(source_code.file_of(config_class)), *flags]


def branch_command(config: Any, changed: Mapping[str, Any]) -> list[Any]:
    """The command of a branch of a run that has the settings `changed`."""
    end = "longer" if changed.keys() == {"max_steps"} else "branch"
    folders = {"branch_from": config.out_dir, "out_dir": f"{config.out_dir.rstrip('/')}-{end}"}
    return train_command(type(config), folders | dict(changed))


def sample_command(source: str, enc: Any, prompt: str, code: Path | None = None) -> list[Any]:
    """The command that continues a prompt, or chats, with a model, whose code is in the file `code`."""
    flags: list[Any] = [("-m", source)]
    if code and code.name != source_code.NAME:
        flags += [("--code", os.path.relpath(code))]
    if has_chat_tokens(enc):
        return ["python", "sample.py", "--chat", *flags]
    return ["python", "sample.py", prompt if prompt and not prompt.startswith("-") else "The ", *flags]


def print_next_commands(config: Any, enc: Any) -> None:
    """Print two commands that come after a run: one to see what it has learned, one to train it for longer."""
    sample = sample_command(config.out_dir, enc, config.sample_prompt, source_code.file_of(type(config)))
    print_next(sample, branch_command(config, {"max_steps": 2 * config.max_steps}))

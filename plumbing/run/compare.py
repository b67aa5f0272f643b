"""Compare ideas by runs with several seeds: which one is better, by how much, and whether the seeds can tell.

    python -m plumbing.run.compare "log/gelu-*" "log/relu2-*"

Runs that differ in nothing but their seed make a group. The other groups are compared with the first one, seed by seed,
by the last validation loss of finished runs on the same data.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import Annotated, Any

from plumbing.cli import console, flags


@dataclasses.dataclass
class Options:
    # the runs' folders, or patterns; by default log/*
    runs: Annotated[tuple[str, ...], "positional"] = ()


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # answers --help and mistyped flags before the slow imports below

import numpy as np

from plumbing.run import source_code
from plumbing.run.logs import Logged, find_runs
from plumbing.run.options import RunOptions, names_of

# what changes neither what a run learns nor what its validation loss means
IGNORED = names_of(RunOptions) | {"preset", "seed", "branch_from"}
# the 0.975 quantiles of Student's t distribution with 1, 2, ... degrees of freedom; the last one is used beyond, too
T_975 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23]


@dataclasses.dataclass
class Group:
    """Runs that differ in nothing but their seed."""

    runs: list[Logged]
    traits: dict[str, Any]  # what may change their loss: {"max_lr": 0.001, "code": "train_relu2 0123abcd"}, say
    different: str = ""  # those traits that not all groups share, such as "max_lr 0.001"

    @property
    def name(self) -> str:
        """What the names of the runs' folders have in common: "gelu" for gelu-1 and gelu-2."""
        names = [run.folder.name for run in self.runs]
        return os.path.commonprefix(names).rstrip("-_. ") or names[0]

    @property
    def losses(self) -> dict[int, float]:
        """{seed: the last validation loss}, of the last run if a seed was run twice."""
        return {run.config["seed"]: float(run.streams["val"][1][-1]) for run in self.runs}

    @property
    def loss(self) -> float:
        return float(np.mean(list(self.losses.values())))


def traits_of(run: Logged) -> dict[str, Any]:
    traits = {name: value for name, value in run.config.items() if name not in IGNORED}
    if run.branch_step:
        traits["branched at"] = run.branch_step
    # the files that ran, one unless it was changed in between
    paths = run.folder.glob("*-????????.py")
    copies = [f"{path.stem[:-9]} {source_code.hash_of(path.read_bytes())[:8]}" for path in paths]
    # a record has the commit instead, perhaps with "-dirty" after its 40 digits
    script = next((word for word in run.fact("command", "").split() if word.endswith(".py")), "?")
    commit = run.fact("commit", "?")
    traits["code"] = " and ".join(sorted(copies)) or f"{script} of {commit[:12]}{commit[40:]}"
    return traits


def group_runs(runs: list[Logged]) -> list[list[Group]]:
    """The groups among finished runs, as a list for each data set. Runs that are left out are named."""
    by_data: dict[Any, dict[str, Group]] = {}
    for run in runs:
        c = run.config
        if not c or "val" not in run.streams:
            print(f"{run.folder} is left out, as it has no {'validation loss' if c else 'run.txt'}.")
        elif run.last_step < c["max_steps"]:
            print(f"{run.folder} is left out: it has done {run.last_step:,} of {c['max_steps']:,} steps.")
        else:
            traits, groups = traits_of(run), by_data.setdefault((c["data"], c["val_tokens"]), {})
            groups.setdefault(str(sorted(traits.items())), Group([], traits)).runs.append(run)
    for groups in by_data.values():
        shared = set.intersection(*(set(map(str, group.traits.items())) for group in groups.values()))
        for group in groups.values():
            own = [trait for trait in group.traits.items() if str(trait) not in shared]
            group.different = ", ".join(f"{name} {value}" for name, value in own)
    return [list(groups.values()) for groups in by_data.values()]


def difference(base: Group, other: Group) -> tuple[float, float, int]:
    """(mean, half of its 95% interval, seeds) of the loss of `other` less that of `base` with the same seed."""
    pairs = [(base.losses[seed], other.losses[seed]) for seed in base.losses if seed in other.losses]
    more, n = np.array([theirs - ours for ours, theirs in pairs] or [np.nan]), len(pairs)
    half = T_975[min(n - 1, len(T_975)) - 1] * more.std(ddof=1) / n**0.5 if n > 1 else np.inf
    return float(more.mean()), float(half), n


def verdict(base: Group, other: Group) -> str:
    """What the seeds show of `other`, compared with `base`, in a sentence."""
    mean, half, n = difference(base, other)
    if n == 0:
        return f"{other.name} and {base.name} have no seed in common. Run both with the same seeds."
    text = f"{other.name} ends {abs(mean):.4f} {'above' if mean > 0 else 'below'} {base.name}"
    if n == 1:
        return f"{text} with one seed. That shows nothing, as another seed moves a loss, too: run three or more."
    text += f" (95% interval {mean - half:+.4f} to {mean + half:+.4f}, {n} seeds)"
    if abs(mean) <= half:
        return f"{text}. Seeds alone may do that: neither is shown to be better."
    return f"{text}: {other.name} is {'worse' if mean > 0 else 'better'}."


def report(groups: list[Group]) -> Iterator[str]:
    """What the runs on one data set show, line by line."""
    yield f"{groups[0].runs[0].config['data']}: last validation loss in nats per token, lowest first"
    width = max(len(group.name) for group in groups)
    for group in sorted(groups, key=lambda group: group.loss):
        ends = list(group.losses.values())
        spread = f"{min(ends):.4f} to {max(ends):.4f}" if len(ends) > 1 else ""
        yield f"  {group.name:{width}}  {group.loss:.4f}  {spread:16}  {len(ends):2} x  {group.different}"
    yield from (verdict(groups[0], group) for group in groups[1:])


def main(args=None):
    patterns = flags.parse(Options, args).runs or ["log/*"]
    runs = find_runs(*patterns)
    if not runs:
        found = " ".join(patterns)
        raise console.UserError(
            f"No folder with a log.txt matches {found}. Give the runs' folders, such as log/*."
        )
    for groups in group_runs(runs):
        print("\n".join(report(groups)) + "\n")


if __name__ == "__main__":
    console.run(main)

"""Compare ideas by runs with several seeds: which one is better, by how much, and whether the seeds can tell.

    python -m plumbing.run.compare "log/gelu-*" "log/relu2-*"

Each pattern is a group: finished runs that differ in nothing but their seed, which is checked. The first group is what
the others are compared with, seed by seed, by the last validation loss or by what --stream names.
"""

import dataclasses
import json
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from plumbing.cli import console, flags
from plumbing.cli.console import UserError, plain


@dataclasses.dataclass
class Options:
    # a pattern for each group of runs, in quotes
    groups: Annotated[tuple[str, ...], "positional"] = ()
    # what of log.txt to compare by: train, val_bpb, hella, val/NAME of several folders of data, or a number of your own
    stream: str = "val"


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # answers --help and mistyped flags before the slow imports below

import numpy as np

from plumbing.run.logs import Logged, find_runs
from plumbing.run.options import RunOptions, names_of

# settings that change no loss, or that another fact stands for
IGNORED = names_of(RunOptions) | {"preset", "seed", "branch_from"}
# which of two values is better, for the streams of which that is known
BETTER = {"val": "lower", "val_bpb": "lower", "train": "lower", "hella": "higher"}
MEASURED_ON = "what they are measured on"
# the 0.975 quantiles of Student's t distribution with 1, 2, ... degrees of freedom; the last one is used beyond, too
T_975 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23]


@dataclasses.dataclass
class Group:
    """Finished runs that differ in nothing but their seed."""

    name: str  # the pattern that matches them
    stream: str  # what they are compared by
    runs: dict[int, Logged]  # by their seeds
    ends: dict[int, float]  # {seed: the stream's last value}
    facts: dict[str, Any]  # what may change the stream's values

    @property
    def mean(self) -> float:
        return float(np.mean([*self.ends.values()]))


# ----- Groups -------------------------------------------------------------------------------------------


def facts_of(run: Logged, stream: str) -> dict[str, Any]:
    """What may change a run's values of a stream: settings, code, data, and the run that it is a branch of."""
    config, (kind, _, folder) = dict(run.config), stream.partition("/")
    weights = config.get("data_weights") or []
    # 0.7 0.3 and 7 3 are one order of the data
    config["data_weights"] = [round(weight / sum(weights), 9) for weight in weights]
    data, branched = run.fact("fingerprints", {"": [config["data"]] * 2}), run.fact("branched", {})
    # several, if the run went on with changed code; a record's run.txt has the script's name alone
    code = [start["code"] for start in run.starts if "code" in start]
    code = code or re.findall(r"[^\s/]+\.py", run.fact("command", ""))[:1]
    if kind == "hella":
        measured_on = config["hellaswag_limit"]
    elif kind not in BETTER:
        measured_on = None  # which only its author knows
    elif folder:
        measured_on = [config["val_tokens"], data.get(folder)]
    elif kind == "train" or len(data) > 1:  # a mean over several folders is by their shares or sizes
        measured_on = [config["val_tokens"], config["data_weights"], data]
    else:
        measured_on = [config["val_tokens"], *(val for _, val in data.values())]
    return {name: value for name, value in config.items() if name not in IGNORED} | {
        "code": " and ".join(dict.fromkeys(code)),
        "training data": [train for train, _ in data.values()],
        MEASURED_ON: measured_on,
        **{f"branch: {name}": branched[name] for name in ("parent", "step") if name in branched},
    }


def examine(run: Logged, stream: str) -> tuple[int, dict[str, Any]]:
    """(seed, facts) of a finished run; UserError says why it cannot be compared."""
    if stream not in run.streams:
        raise UserError(f"its log has no {stream}, but has {', '.join(run.streams) or 'nothing'}")
    try:
        seed, max_steps = (operator.index(run.config[name]) for name in ("seed", "max_steps"))
        facts = facts_of(run, stream)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # people may have edited it
        raise UserError(f"its run.txt is missing or damaged ({error!r})") from None
    step, kind = run.streams[stream][0][-1], stream.partition("/")[0]
    if step < max_steps - (kind == "train" or kind not in BETTER):  # an evaluation follows the last step
        raise UserError(f"its last {stream} is of step {step:,} of {max_steps:,}")
    return seed, facts


def read_group(pattern: str, stream: str = "val") -> Group:
    """The finished runs that match a pattern; others are named. UserError if their seed is not all that differs."""
    group = Group(plain(pattern), stream, runs={}, ends={}, facts={})
    for run in find_runs(pattern):
        try:
            seed, facts = examine(run, stream)
        except UserError as error:
            print(f"{plain(run.folder)} is left out: {error}.")
            continue
        if different := differences(group.facts or facts, facts):
            both = f"{run.folder} and {next(iter(group.runs.values())).folder}"
            raise UserError(f"{both} differ in {', '.join(different)}. Give each of them a pattern of its own.")
        if other := group.runs.get(seed):
            check_repeat(run, other, stream)
            print(f"{plain(run.folder)} repeats {plain(other.folder)}, seed included, and is not counted again.")
            continue
        group.facts, group.runs[seed], group.ends[seed] = facts, run, float(run.streams[stream][1][-1])
    if not group.runs:
        raise UserError(f'No finished run matches {pattern}. Give each group a pattern in quotes: "log/gelu-*".')
    return group


def check_repeat(run: Logged, other: Logged, stream: str) -> None:
    """UserError unless two runs, of which the seed and all facts are the same, have the same losses."""
    for name in [name for name in (stream, "train") if name in run.streams and name in other.streams]:
        ends = [each.streams[name][1][-1] for each in (run, other)]
        if not np.isclose(*ends, rtol=1e-4, equal_nan=True):  # a sum in another order changes the last digits
            raise UserError(
                f"{run.folder} and {other.folder} have the same settings, code and seed, but end at {ends[0]} and "
                f"{ends[1]} ({name}). Something that is not recorded was different, such as a change in memory or the "
                "machine: give each of them a pattern of its own."
            )


def read_tables(patterns: Sequence[str], stream: str = "val") -> list[list[Group]]:
    """The groups of these patterns, as a list for each data set that they are measured on."""
    tables: dict[str, list[Group]] = {}
    for group in [read_group(pattern, stream) for pattern in patterns]:
        # bits per byte are comparable where the text is the same, which only the user knows
        key = "" if stream.startswith("val_bpb") else json.dumps(group.facts[MEASURED_ON])
        tables.setdefault(key, []).append(group)
    return [*tables.values()]


def differences(*facts: dict[str, Any]) -> list[str]:
    """The names of the facts that are not the same in all of these."""
    names = dict.fromkeys(name for each in facts for name in each)
    return [name for name in names if any(each.get(name) != facts[0].get(name) for each in facts)]


# ----- What they show -----------------------------------------------------------------------------------


def difference(base: Group, other: Group) -> tuple[float, float, int]:
    """(mean, half of its 95% interval, seeds) of the ends of `other` less those of `base` with the same seed."""
    more = np.array([other.ends[seed] - base.ends[seed] for seed in base.ends if seed in other.ends] or [np.nan])
    n = sum(seed in other.ends for seed in base.ends)
    half = T_975[min(n - 1, len(T_975)) - 1] * more.std(ddof=1) / n**0.5 if n > 1 else np.inf
    return float(more.mean()), float(half), n


def verdict(base: Group, other: Group) -> str:
    """What the seeds show of `other`, compared with `base`, in a sentence."""
    if not np.isfinite([base.mean, other.mean]).all():
        return f"{other.name} and {base.name} cannot be compared, as a run of them has diverged."
    mean, half, n = difference(base, other)
    if n == 0:
        both = f"{other.name} and {base.name}"
        return f"{both} have no seed in common. Run both with the same seeds, and put each pattern in quotes."
    text = f"{other.name} ends {abs(mean):.4f} {'above' if mean > 0 else 'below'} {base.name}"
    if n == 1:
        return f"{text} with one seed. That shows nothing, as another seed moves a loss, too: run three or more."
    text += f" (95% interval {mean - half:+.4f} to {mean + half:+.4f}, {n} seeds)"
    if abs(mean) <= half:
        return f"{text}. Seeds alone may do that: neither is shown to be better."
    found, better = "higher" if mean > 0 else "lower", BETTER.get(base.stream.partition("/")[0])
    if not better or base.facts[MEASURED_ON] != other.facts[MEASURED_ON]:
        return f"{text}: {other.name} is {found}."
    return f"{text}: {other.name} is {'better' if found == better else 'worse'}."


def report(groups: Sequence[Group]) -> Iterator[str]:
    """What the groups of one table show, line by line."""
    different = differences(*(group.facts for group in groups))
    if MEASURED_ON in different:
        yield "note: These are not measured on the same tokens. Only if their text is the same is lower also better."
        different.remove(MEASURED_ON)
    yield f"last {groups[0].stream}: mean and standard deviation over the seeds, and what differs"
    width = max(len(group.name) for group in groups)
    for group in groups:
        ends = [*group.ends.values()]
        spread = f"+-{np.std(ends, ddof=1):.4f}" if len(ends) > 1 and np.isfinite(ends).all() else ""
        facts = [f"{name} {plain(group.facts[name], 60)}" for name in different if name in group.facts]
        shown = ", ".join(facts) or ("nothing that is recorded" if len(groups) > 1 else "")
        yield f"  {group.name:{width}}  {group.mean:.4f} {spread:8}  {len(ends)} x  {shown}".rstrip()
    yield from (verdict(groups[0], group) for group in groups[1:])


def main(args=None):
    options = flags.parse(Options, args)
    if not options.groups:
        raise UserError('Give a pattern in quotes for each group of runs, such as "log/gelu-*" "log/relu2-*".')
    tables = read_tables(options.groups, options.stream)
    print("\n\n".join("\n".join(report(groups)) for groups in tables))
    if len(tables) > 1:
        print(
            "\nThese tables cannot be compared, as they are measured on other data, or on another number of tokens or "
            "examples. Bits per byte (--stream val_bpb) can be, where the text is the same and only its tokens differ."
        )


if __name__ == "__main__":
    console.run(main, output_is_product=True)

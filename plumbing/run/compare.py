"""Compare ideas over several seeds: which is better, and is that more than noise?

    python -m plumbing.run.compare "log/gelu-*" "log/relu2-*"

Each pattern names a group of finished runs. They may differ only in their seed,
which is checked. The other groups are compared with the first one, seed by
seed, by the last validation loss or by another --stream.
"""

import dataclasses
import itertools
import json
import math
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from plumbing.cli import console, flags
from plumbing.cli.console import UserError, plain


@dataclasses.dataclass
class Options:
    # one pattern for each group of runs, in quotes
    groups: Annotated[tuple[str, ...], "positional"] = ()
    # the number in log.txt to compare: val, val_bpb, train, hella, val/NAME for one of several folders, or your own
    stream: str = "val"


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # answers --help and mistyped flags before the slow imports below

import numpy as np

from plumbing.run.logs import Logged, find_runs
from plumbing.run.options import RunOptions, names_of

# settings that do not change the loss, or that another fact covers
IGNORED = names_of(RunOptions) | {"preset", "seed", "branch_from"}
# the better of two values, in the streams where this is known
BETTER = {"val": "lower", "val_bpb": "lower", "train": "lower", "hella": "higher"}
MEASURED_ON = "what they are measured on"
# the 0.975 quantiles of Student's t distribution with 1, 2, ... degrees of freedom; the last one serves for more
T_975 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23]


@dataclasses.dataclass
class Group:
    """Finished runs that differ only in their seed."""

    name: str  # the pattern that matches them
    stream: str  # the number that is compared
    runs: dict[int, Logged] = dataclasses.field(default_factory=dict)  # by seed
    ends: dict[int, float] = dataclasses.field(default_factory=dict)  # {seed: the stream's last value}
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # everything that may change these values

    @property
    def mean(self) -> float:
        return float(np.mean([*self.ends.values()]))


# ----- Groups -------------------------------------------------------------------------------------------


def kind_of(stream: str) -> str:
    """val/code -> val"""
    return stream.partition("/")[0]


def last_value(run: Logged, stream: str) -> float:
    _, values = run.streams[stream]
    return float(values[-1])


def facts_of(run: Logged, stream: str) -> dict[str, Any]:
    """Everything that may change a run's values of a stream: settings, code, data, and the run it branched from."""
    config = dict(run.config)
    weights = config.get("data_weights") or []
    # shares of 0.7 and 0.3 give the same order of the data as shares of 7 and 3
    config["data_weights"] = [round(weight / sum(weights), 9) for weight in weights]
    # {folder: fingerprints of its training and validation data}
    data = run.fact("fingerprints", {"": [config["data"], config["data"]]})
    # more than one version if the code was changed between two starts; a record's run.txt has only the script's name
    code = [start["code"] for start in run.starts if "code" in start]
    if not code:
        code = re.findall(r"[^\s/]+\.py", run.fact("command", ""))[:1]
    facts = {name: value for name, value in config.items() if name not in IGNORED}
    facts["code"] = " and ".join(dict.fromkeys(code))
    facts["training data"] = [train for train, _ in data.values()]
    facts[MEASURED_ON] = measured_on(config, data, stream)
    branched = run.fact("branched", {})
    for name in ("parent", "step"):
        if name in branched:
            facts[f"branch: {name}"] = branched[name]
    return facts


def measured_on(config: dict[str, Any], data: dict[str, Any], stream: str) -> Any:
    """The tokens or examples that a stream is measured on; None for your own numbers, because only you know."""
    kind, _, folder = stream.partition("/")
    if kind == "hella":
        return config["hellaswag_limit"]
    if kind not in BETTER:
        return None
    val_tokens = config["val_tokens"]
    if folder:
        return [val_tokens, data.get(folder)]
    if kind == "train" or len(data) > 1:  # the mean of several folders depends on their shares or sizes
        return [val_tokens, config["data_weights"], data]
    return [val_tokens, *(val for _, val in data.values())]


def read_facts(run: Logged, stream: str) -> tuple[int, dict[str, Any]]:
    """(seed, facts) of a finished run; UserError says why it cannot be compared."""
    if stream not in run.streams:
        raise UserError(f"its log has no {stream}. It has: {', '.join(run.streams) or 'nothing'}")
    try:
        seed = operator.index(run.config["seed"])
        max_steps = operator.index(run.config["max_steps"])
        facts = facts_of(run, stream)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # people may have edited it
        raise UserError(f"its run.txt is missing or damaged ({error!r})") from None
    steps, _ = run.streams[stream]
    kind = kind_of(stream)
    is_of_a_step = kind == "train" or kind not in BETTER  # an evaluation comes after the last step
    last_step = max_steps - 1 if is_of_a_step else max_steps
    if steps[-1] < last_step:
        raise UserError(f"its last {stream} is at step {steps[-1]:,} of {max_steps:,}")
    return seed, facts


def read_group(pattern: str, stream: str = "val") -> Group:
    """The finished runs that match a pattern. Other runs are left out, with a message.

    UserError if the runs differ in more than their seed.
    """
    group = Group(plain(pattern), stream)
    for run in find_runs(pattern):
        try:
            seed, facts = read_facts(run, stream)
        except UserError as error:
            print(f"{plain(run.folder)} is left out: {error}.")
            continue
        different = differences(group.facts or facts, facts)
        if different:
            first = next(iter(group.runs.values()))
            raise UserError(
                f"{run.folder} and {first.folder} differ in {', '.join(different)}. Give each of them its own pattern."
            )
        if seed in group.runs:
            other = group.runs[seed]
            check_repeat(run, other, stream)
            print(f"{plain(run.folder)} repeats {plain(other.folder)} with the same seed, so it is not counted.")
            continue
        group.facts = facts
        group.runs[seed] = run
        group.ends[seed] = last_value(run, stream)
    if not group.runs:
        raise UserError(
            f'No finished run matches {pattern} and has {stream}. Give each group a pattern in quotes: "log/gelu-*".'
        )
    return group


def check_repeat(run: Logged, other: Logged, stream: str) -> None:
    """Raise UserError unless two runs with the same seed and the same facts have the same losses."""
    for name in (stream, "train"):
        if name not in run.streams or name not in other.streams:
            continue
        end = last_value(run, name)
        others_end = last_value(other, name)
        # sums in another order change the last digits
        if not np.isclose(end, others_end, rtol=1e-4, equal_nan=True):
            raise UserError(
                f"{run.folder} and {other.folder} have the same settings, code and seed, but end at {end} and "
                f"{others_end} ({name}). Something that is not recorded was different, such as the machine or a "
                "function replaced in memory. Give each of them its own pattern."
            )


def read_tables(patterns: Sequence[str], stream: str = "val") -> list[list[Group]]:
    """The groups of these patterns, in one list for each data set that they are measured on."""
    tables: dict[str, list[Group]] = {}
    for pattern in patterns:
        group = read_group(pattern, stream)
        # bits per byte can be compared if the text is the same, and only the user knows that
        key = "" if kind_of(stream) == "val_bpb" else json.dumps(group.facts[MEASURED_ON])
        tables.setdefault(key, []).append(group)
    return [*tables.values()]


def differences(*facts: dict[str, Any]) -> list[str]:
    """The names of the facts that are not equal in all of these."""
    names = dict.fromkeys(itertools.chain(*facts))
    return [name for name in names if any(each.get(name) != facts[0].get(name) for each in facts)]


# ----- Results ------------------------------------------------------------------------------------------


def difference(base: Group, other: Group) -> tuple[float, float, int]:
    """(mean, half of its 95% interval, number of seeds) of `other` minus `base`, over the seeds that both have."""
    seeds = [seed for seed in base.ends if seed in other.ends]
    n = len(seeds)
    if n == 0:
        return math.nan, math.inf, 0
    more = np.array([other.ends[seed] - base.ends[seed] for seed in seeds])
    mean = float(more.mean())
    if n == 1:
        return mean, math.inf, 1
    t = T_975[min(n - 1, len(T_975)) - 1]
    return mean, float(t * more.std(ddof=1) / n**0.5), n


def verdict(base: Group, other: Group) -> str:
    """Say whether `other` is better than `base`, as far as the seeds show it."""
    if not np.isfinite([base.mean, other.mean]).all():
        return f"{other.name} and {base.name} cannot be compared, because one of their runs has diverged."
    mean, half, n = difference(base, other)
    if n == 0:
        both = f"{other.name} and {base.name}"
        return f"{both} have no seed in common. Run both with the same seeds, and put each pattern in quotes."
    side = "above" if mean > 0 else "below"
    text = f"{other.name} ends {abs(mean):.4f} {side} {base.name}"
    if n == 1:
        return f"{text} with one seed. That shows nothing: another seed moves a loss as well. Run three seeds."
    text += f" (95% interval {mean - half:+.4f} to {mean + half:+.4f}, {n} seeds)"
    if abs(mean) <= half:
        return f"{text}. Seeds alone may do that: neither is shown to be better."
    direction = "higher" if mean > 0 else "lower"
    better = BETTER.get(kind_of(base.stream))
    if not better or base.facts[MEASURED_ON] != other.facts[MEASURED_ON]:
        return f"{text}: {other.name} is {direction}."
    return f"{text}: {other.name} is {'better' if direction == better else 'worse'}."


def report(groups: Sequence[Group]) -> Iterator[str]:
    """Yield the lines of a table: each group's mean, then its difference from the first group."""
    different = differences(*(group.facts for group in groups))
    if MEASURED_ON in different:
        yield "note: These are not measured on the same tokens. Lower is better only if their text is the same."
        different.remove(MEASURED_ON)
    yield f"last {groups[0].stream}: mean and standard deviation over the seeds, and what differs"
    width = max(len(group.name) for group in groups)
    for group in groups:
        ends = [*group.ends.values()]
        has_spread = len(ends) > 1 and np.isfinite(ends).all()
        spread = f"+-{np.std(ends, ddof=1):.4f}" if has_spread else ""
        facts = [f"{name} {plain(group.facts[name], 60)}" for name in different if name in group.facts]
        if not facts and len(groups) > 1:
            facts = ["nothing that is recorded"]
        yield f"  {group.name:{width}}  {group.mean:.4f} {spread:8}  {len(ends)} x  {', '.join(facts)}".rstrip()
    for group in groups[1:]:
        yield verdict(groups[0], group)


def main(args=None):
    options = flags.parse(Options, args)
    if not options.groups:
        raise UserError('Give a pattern in quotes for each group of runs, such as "log/gelu-*" "log/relu2-*".')
    tables = read_tables(options.groups, options.stream)
    print("\n\n".join("\n".join(report(groups)) for groups in tables))
    if len(tables) > 1:
        print(
            "\nThese tables cannot be compared with each other: they are measured on different data, or on different "
            "numbers of tokens or examples. Bits per byte (--stream val_bpb) can be compared if the text is the same "
            "and only the tokenizer differs."
        )


if __name__ == "__main__":
    console.run(main, output_is_product=True)

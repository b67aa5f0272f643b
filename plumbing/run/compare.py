"""Compare ideas by runs with several seeds: which one is better, by how much, and whether the seeds can tell.

    python -m plumbing.run.compare "log/gelu-*" "log/relu2-*"

Runs that differ in nothing but their seed make a group. The other groups are compared with the first one, seed by seed,
by the last validation loss of finished runs on the same data: with several folders of data, by that on each of them. A
log of nanoGPT or build-nanogpt may be named beside them.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from plumbing.cli import console, flags
from plumbing.cli.console import plain


@dataclasses.dataclass
class Options:
    # the runs' folders, or patterns; by default log/*
    runs: Annotated[tuple[str, ...], "positional"] = ()
    # what of log.txt to compare by, such as val/code or hella; by default all validation losses
    stream: str = ""


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # answers --help and mistyped flags before the slow imports below

import numpy as np

from plumbing.data.windows import stream_names
from plumbing.run import source_code
from plumbing.run.logs import Logged, find_runs
from plumbing.run.options import RunOptions, names_of

# what changes neither what a run learns nor what its validation loss means, or has a trait of its own
IGNORED = names_of(RunOptions) | {"preset", "seed", "branch_from", "init_from"}
# what the streams of an evaluation are, up to a slash, and whether more is better
EVALUATIONS = {
    "val": ("validation loss in nats per token", -1),
    "val_bpb": ("validation loss in bits per byte", -1),
    "hella": ("HellaSwag accuracy", 1),
}
LABELS = EVALUATIONS | {"train": ("training loss in nats per token", -1)}
# the 0.975 quantiles of Student's t distribution with 1, 2, ... degrees of freedom; the last one is used beyond, too
T_975 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23]


@dataclasses.dataclass
class Group:
    """Runs that differ in nothing but their seed, or one log of which nothing else is known."""

    runs: list[Logged]
    traits: dict[str, Any]  # what may change their loss: {"max_lr": 0.001, "code": "train_relu2 0123abcd"}, say
    streams: list[str]  # what the groups of a table are compared by
    different: str = ""  # those traits that not all groups share, such as "max_lr 0.001"

    @property
    def name(self) -> str:
        """What the names of the runs' folders have in common: "gelu" for gelu-1 and gelu-2."""
        names = [run.folder.name for run in self.runs]
        return plain(os.path.commonprefix(names).rstrip("-_. ") or names[0])

    @property
    def seeds(self) -> list[Any]:
        """What each run is paired by with those of other groups: its seed, or its parent's where only that varies."""
        columns = list(zip(*map(seeds_of, self.runs)))
        varying = [column for column in columns if len(set(column)) > 1] or columns[:1]
        return [each[0] if len(set(each)) == 1 else each for each in zip(*varying)]

    def ends(self, stream: str) -> dict[Any, float]:
        """{seed: the last value of a stream}, the mean of them if a seed was run twice."""
        found: dict[Any, list[float]] = {}
        for seed, run in zip(self.seeds, self.runs):
            found.setdefault(seed, []).append(end_of(run, stream)[1])
        return {seed: float(np.mean(values)) for seed, values in found.items()}

    @property
    def losses(self) -> dict[Any, float]:
        return self.ends(self.streams[0])

    @property
    def loss(self) -> float:
        return float(np.mean(list(self.losses.values())))


# ----- What is to be known of a run ---------------------------------------------------------------------


def data_of(run: Logged) -> dict[str, list[str]]:
    """{a folder's name in the log: what it is trained on, and validated on}: fingerprints; in older runs its path."""
    folders = run.config.get("data", [])
    folders = [folders] if isinstance(folders, str) else folders
    paths = {name: [os.path.normpath(path)] * 2 for name, path in zip(stream_names(folders), folders)}
    return run.fact("fingerprints", paths)


def validations(run: Logged) -> list[str]:
    """The streams of a run's validation losses, one for each folder of its data."""
    names = sorted(data_of(run))
    return [f"val/{name}" for name in names] if len(names) > 1 else ["val"]


def end_of(run: Logged, stream: str) -> tuple[int, float]:
    """(step, value) of the last value of a stream; (-1, nan) if there is none."""
    kind, _, name = stream.partition("/")
    if stream not in run.streams and [name] == list(data_of(run)):
        stream = kind  # with one folder, val/NAME is logged as val
    steps, values = run.streams.get(stream, ([-1], [np.nan]))
    return int(steps[-1]), float(values[-1])


def shares_of(run: Logged) -> list[float]:
    """The folders' shares of the data; [] if each window is read once per epoch."""
    weights = run.config.get("data_weights") or []
    return [round(weight / sum(weights), 6) for weight in weights] if len(weights) > 1 else []


def measured_on(run: Logged, stream: str) -> Any:
    """What a stream's values are measured on: values on something else cannot be compared with them."""
    (kind, _, name), data, config = stream.partition("/"), data_of(run), run.config
    if kind == "hella":
        return config.get("hellaswag_limit", 0)
    if kind == "train":
        return sorted(train for train, _ in data.values()), shares_of(run)
    if kind not in EVALUATIONS:
        return None
    on = [val for each, (_, val) in data.items() if each == name or not name]
    # the mean of several is by the folders' shares or, without, by their sizes
    shares = (shares_of(run) or [train for train, _ in data.values()]) if len(on) > 1 else [1.0]
    return config.get("val_tokens"), sorted(zip(on, shares))


def seeds_of(run: Logged) -> list[Any]:
    """The seeds of a run, its parent, that one's parent, and so on; of a log alone its name, as that has no other."""
    own = run.config.get("seed", str(run.folder))
    return [own, *(seeds_of(run.parent) if run.parent else [])]


def traits_of(run: Logged) -> dict[str, Any]:
    traits = {name: value for name, value in run.config.items() if name not in IGNORED}
    traits["data_weights"] = shares_of(run)
    traits["training data"] = [train for train, _ in data_of(run).values() if train]
    # the files that ran, one unless it was changed in between
    copies = {f"{path.stem[:-9]} {code[:8]}" for path, code in source_code.copies_in(run.folder).items()}
    # a record has the commit instead, perhaps with "-dirty" after its 40 digits
    script = next((word for word in run.fact("command", "").split() if word.endswith(".py")), "?")
    commit = run.fact("commit", "?")
    traits["code"] = " and ".join(sorted(copies)) or f"{script} of {commit[:12]}{commit[40:]}"
    step, parent = run.branch_step, run.parent
    named = run.config.get("branch_from" if step else "init_from", "")
    if parent:  # which counts by its traits and not by its name, as each seed may have a parent of its own
        traits |= {f"parent's {name}": value for name, value in traits_of(parent).items()}
        saved = f"model_{step or parent.config.get('max_steps', 0):05d}"
        if named.endswith(".pt") and not step:
            saved = Path(named).stem
        traits["begins with"] = f"its parent's {'state' if step else 'weights'}, {saved}"
    else:
        traits["begins with"] = f"{named}, step {step}" if step else named
    return traits


def why_left_out(run: Logged, streams: list[str]) -> str:
    """Why a run cannot be compared by these streams; "" if it can."""
    missing = [name for name in ("seed", "max_steps", "data") if name not in run.config]
    if run.starts and missing:
        return f"its run.txt has no {' and no '.join(missing)}" if run.config else "its run.txt is damaged"
    for stream in streams:
        step, _ = end_of(run, stream)
        if step < 0:
            return f"its log has no {stream}"
        # an evaluation is done after the last step, too
        if run.config and step < run.config["max_steps"] - (stream.partition("/")[0] not in EVALUATIONS):
            return f"its last {stream} is of step {step:,} of {run.config['max_steps']:,}"
    return ""


# ----- Groups -------------------------------------------------------------------------------------------


def group_runs(runs: list[Logged], stream: str = "") -> list[list[Group]]:
    """The groups among finished runs, as a list for each data set. Runs that are left out are named."""
    tables: dict[str, dict[str, Group]] = {}
    logs_alone: list[Group] = []
    for run in runs:
        streams = [stream] if stream else validations(run)
        problem = why_left_out(run, streams)
        if problem:
            print(f"{plain(run.folder)} is left out: {problem}.")
        elif not run.config:
            logs_alone.append(Group([run], {}, streams, f"a log alone, to step {run.last_step:,}"))
        else:
            key, traits = str([(each, measured_on(run, each)) for each in streams]), traits_of(run)
            groups = tables.setdefault(key, {})
            group = groups.setdefault(str(sorted(traits.items())), Group([], traits, streams))
            same = [other for other in group.runs if seeds_of(other) == seeds_of(run)]
            if same:
                both = f"{plain(run.folder)} repeats {plain(same[0].folder)}"
                print(f"{both}, seed included: they count once, by their mean.")
            group.runs.append(run)
    found = [list(groups.values()) for groups in tables.values()]
    for groups in found:
        say_what_differs(groups)
        means = {str(measured_on(run, "val")) for group in groups for run in group.runs}
        if len(groups[0].streams) > 1 and len(means) == 1:
            for group in groups:
                group.streams.insert(0, "val")
        # nobody knows on which data a log alone is: that is for those to judge who have named it
        groups += [group for group in logs_alone if group.streams == groups[0].streams]
    others = [group for group in logs_alone if not any(group in groups for groups in found)]
    return [*found, others] if others else found


def say_what_differs(groups: list[Group]) -> None:
    """Fill in each group's `different`."""
    names = {
        train: f"{name}-{train[:8]}"
        for group in groups
        if group.runs[0].fact("fingerprints", {})
        for name, (train, _) in data_of(group.runs[0]).items()
    }
    shared = set.intersection(*(set(map(str, group.traits.items())) for group in groups))
    everywhere = set.intersection(*(set(group.traits) for group in groups))
    for group in groups:
        told = []
        for name, value in group.traits.items():
            if str((name, value)) in shared or (name.startswith("parent's ") and name not in everywhere):
                continue  # where others have no parent, "begins with" says enough
            words = [names.get(str(each), str(each)) for each in (value if isinstance(value, list) else [value])]
            told.append(f"{name} {' '.join(words)}" if value not in ("", []) else f"no {name}")
        group.different = plain(", ".join(told).replace("no begins with", "begins from scratch"), limit=1000)


# ----- What they show -----------------------------------------------------------------------------------


def difference(base: Group, other: Group, stream: str = "") -> tuple[float, float, int]:
    """(mean, half of its 95% interval, seeds) of the loss of `other` less that of `base` with the same seed."""
    ours, theirs = (group.ends(stream or base.streams[0]) for group in (base, other))
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    more, n = np.array([after - before for before, after in pairs] or [np.nan]), len(pairs)
    half = T_975[min(n - 1, len(T_975)) - 1] * more.std(ddof=1) / n**0.5 if n > 1 else np.inf
    return float(more.mean()), float(half), n


def verdict(base: Group, other: Group, stream: str = "") -> str:
    """What the seeds show of `other`, compared with `base`, in a sentence."""
    stream = stream or base.streams[0]
    for group in (base, other):
        ends = [f"{end} with seed {seed}" for seed, end in group.ends(stream).items() if not np.isfinite(end)]
        if ends:
            return f"{group.name} ends at {', '.join(ends)}: {other.name} and {base.name} cannot be compared."
    mean, half, n = difference(base, other, stream)
    alone = [group.name for group in (base, other) if not group.traits]
    if alone:
        mean = float(np.mean([*other.ends(stream).values()]) - np.mean([*base.ends(stream).values()]))
    elif n == 0:
        return f"{other.name} and {base.name} have no seed in common. Run both with the same seeds."
    text = f"{other.name} ends {abs(mean):.4f} {'above' if mean > 0 else 'below'} {base.name}"
    text += f" in {stream}" if stream != "val" or len(base.streams) > 1 else ""
    if alone:
        return f"{text}. Whether that is of the same data, tokens and code, the log of {alone[0]} does not say."
    if n == 1:
        return f"{text} with one seed. That shows nothing, as another seed moves a loss, too: run three or more."
    text += f" (95% interval {mean - half:+.4f} to {mean + half:+.4f}, {n} seeds)"
    if abs(mean) <= half:
        return f"{text}. Seeds alone may do that: neither is shown to be better."
    _, more_is_better = LABELS.get(stream.partition("/")[0], ("", 0))
    if not more_is_better:
        return f"{text}: {other.name} is {'higher' if mean > 0 else 'lower'}."
    return f"{text}: {other.name} is {'better' if mean * more_is_better > 0 else 'worse'}."


def table(groups: list[Group]) -> Iterator[str]:
    """The groups on one data set, best first, line by line."""
    streams, first = groups[0].streams, groups[0].runs[0].config
    data = first.get("data", "unknown data")
    label, more_is_better = LABELS.get(streams[0].partition("/")[0], (streams[0], 0))
    order = f"{'highest' if more_is_better > 0 else 'lowest'} first"
    yield f"{plain(data if isinstance(data, str) else ' '.join(data))}: last {label}, {order}"
    width = max(len(group.name) for group in groups)
    yield f"  {'':{width}}  {'  '.join(f'{stream:15}' for stream in streams)}  (+- half of what the seeds span)"
    sign = -1 if more_is_better > 0 else 1
    # a loss that is no number is the worst
    for group in sorted(groups, key=lambda group: (not np.isfinite(group.loss), sign * group.loss)):
        cells = []
        for stream in streams:
            ends = [*group.ends(stream).values()]
            spread = f" +-{(max(ends) - min(ends)) / 2:.4f}" if len(ends) > 1 else ""
            cells.append(f"{np.mean(ends):.4f}{spread}".ljust(max(15, len(stream))))
        yield f"  {group.name:{width}}  {'  '.join(cells)}  {len(group.losses):2} x  {group.different}"


def report(groups: list[Group]) -> Iterator[str]:
    """What the runs on one data set show, line by line."""
    yield from table(groups)
    for group in groups[1:]:
        yield from (verdict(groups[0], group, stream) for stream in group.streams)


def main(args=None):
    options = flags.parse(Options, args)
    patterns = options.runs or ("log/*",)
    unmatched = [pattern for pattern in patterns if not find_runs(pattern)]
    if unmatched:
        found = " or ".join(unmatched)
        raise console.UserError(
            f"No folder with a log.txt matches {found}. Give the runs' folders, such as log/*."
        )
    runs = find_runs(*patterns)
    if options.stream and not any(end_of(run, options.stream)[0] >= 0 for run in runs):
        streams = ", ".join(dict.fromkeys(stream for run in runs for stream in run.streams))
        raise console.UserError(f"No log has a stream {options.stream}. Give one of these: {streams}.")
    for groups in group_runs(runs, options.stream):
        print("\n".join(report(groups)) + "\n")


if __name__ == "__main__":
    console.run(main)

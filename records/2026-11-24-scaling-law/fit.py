"""Fit L(N, D) = E + A / N^a + B / D^b to the finished runs in runs/, and draw it.

    python records/2026-11-24-scaling-law/fit.py             # the tables, fit.txt and law.png
    python records/2026-11-24-scaling-law/fit.py --predict   # prediction.txt: what 6x192 on 48M tokens should end at

N has no embeddings: 12 L d^2, the blocks' matrices. This was declared before the first fit. With embeddings (wte, tied
to the output, and wpe) it is fitted as well, to be compared.

The fit takes the mean of the seeds where there are two. For given a and b the law is linear in E, A and B, so these follow
from least squares, and only a and b are searched: on a grid, which is then narrowed five times around the best cell.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from runs import GRID, KEPT, PREDICTED, SERIES, SIZES, STEPS, TOKENS_PER_STEP, kept_val  # noqa: E402

COLORS = dict(zip(SIZES, ("#1f77b4", "#2ca02c", "#e6a000", "#d62728", "#9467bd")))
NUM_BOOTSTRAP = 1000
COPYING = ("4x128", "5x160", "6x192")  # the sizes that copy within 5M tokens (copying.txt), which are fitted alone, too
VOCABULARY, BLOCK = 320, 128  # rows of wte, padded, and of wpe
PREDICTED_SIZE = PREDICTED[0].split("-")[0]


def parameters(size, with_embeddings=False):
    layers, channels = SIZES[size]
    return 12 * layers * channels**2 + with_embeddings * (VOCABULARY + BLOCK) * channels


def tokens(length):
    return STEPS[length] * TOKENS_PER_STEP


# ----- The fit ------------------------------------------------------------------------------------------


def solve(N, D, L, weights, a, b, E=None):
    """(cost, E, A, B) of the weighted least squares for each pair of a and b; the cost of negative ones is infinite."""
    # relative to the middle of the points, so that the columns have like sizes
    x, y = (N / N.mean()) ** -a[:, None], (D / D.mean()) ** -b[:, None]  # (pairs, points)
    columns = [x, y] if E is not None else [np.ones_like(x), x, y]
    X, target = np.stack(columns, 2), L - (E or 0)
    gram = np.einsum("gpi,p,gpj->gij", X, weights, X) + 1e-12 * np.eye(len(columns))
    c = np.linalg.solve(gram, np.einsum("gpi,p->gi", X, weights * target)[..., None])[..., 0]
    cost = (weights * (target - np.einsum("gpi,gi->gp", X, c)) ** 2).sum(1)
    cost[(c < 0).any(1)] = np.inf
    if E is not None:
        c = np.column_stack([np.full(len(c), E), c])
    return cost, c[:, 0], c[:, 1] * N.mean() ** a, c[:, 2] * D.mean() ** b


def fit(N, D, L, weights=None, E=None):
    """The law {E, A, B, a, b, rms}; None if no positive one was found. With E it is held at that value."""
    weights = np.ones(len(L)) if weights is None else weights
    low, high = np.log([0.03, 0.03]), np.log([3.0, 3.0])
    best = None
    for _ in range(6):
        a, b = np.meshgrid(*(np.exp(np.linspace(low[i], high[i], 25)) for i in (0, 1)))
        a, b = a.ravel(), b.ravel()
        cost, e, A, B = solve(N, D, L, weights, a, b, E)
        i = int(cost.argmin())
        if not np.isfinite(cost[i]):
            return best
        rms = float(np.sqrt(cost[i] / weights.sum()))
        best = dict(E=e[i], A=A[i], B=B[i], a=a[i], b=b[i], rms=rms)
        width = (high - low) / 5
        low, high = np.log([a[i], b[i]]) - width / 2, np.log([a[i], b[i]]) + width / 2
    return best


def loss(law, N, D):
    return law["E"] + law["A"] / N ** law["a"] + law["B"] / D ** law["b"]


def optimum(law, C):
    """(N, D) with the lowest loss for C = 6 N D."""
    a, b = law["a"], law["b"]
    G = (a * law["A"] / (b * law["B"])) ** (1 / (a + b))
    N = G * (C / 6) ** (b / (a + b))
    return N, C / 6 / N


def bootstrap(points, with_embeddings=False):
    """Laws of resampled points: cells of (size, length) with replacement, and in each one of its seeds.

    A sample needs three sizes and three lengths, as the whole does.
    """
    rng, laws = np.random.default_rng(0), []
    cells = {}
    for size, length, _, value in points:
        cells.setdefault((size, length), []).append(value)
    keys = list(cells)
    while len(laws) < NUM_BOOTSTRAP:
        drawn = [keys[i] for i in rng.integers(len(keys), size=len(keys))]
        if min(len({key[i] for key in drawn}) for i in (0, 1)) < 3:
            continue
        N = np.array([parameters(size, with_embeddings) for size, _ in drawn], float)
        D = np.array([tokens(length) for _, length in drawn], float)
        laws.append(fit(N, D, np.array([rng.choice(cells[key]) for key in drawn])))
    return [law for law in laws if law]


def interval(values, digits):
    low, high = np.percentile(values, [5, 95])
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


# ----- The points ---------------------------------------------------------------------------------------


def finished():
    """[(size, length, seed, validation loss)] of the runs at the rule's rates, but for the predicted one."""
    points = []
    for name, (size, seed, factor, lengths) in SERIES.items():
        for length in lengths:
            value = kept_val(name, length)
            if factor == 1 and value is not None:
                points.append((size, length, seed, value))
    return points


def arrays(points, with_embeddings=False):
    """(N, D, mean loss over the seeds) of each pair of size and length."""
    values = {}
    for size, length, _, value in points:
        values.setdefault((size, length), []).append(value)
    N = np.array([parameters(size, with_embeddings) for size, _ in values], float)
    return N, np.array([tokens(length) for _, length in values], float), np.array([np.mean(v) for v in values.values()])


def seed_noise(points):
    """(the standard deviation of a run between seeds, number of pairs, mean of seed 2 minus seed 1)"""
    found = {(size, length, seed): value for size, length, seed, value in points}
    pairs = [found[s, d, 2] - value for (s, d, seed), value in found.items() if seed == 1 and (s, d, 2) in found]
    return (np.sqrt(np.mean(np.square(pairs)) / 2), len(pairs), np.mean(pairs)) if pairs else (np.nan, 0, np.nan)


def seconds_of(path):
    return path.read_text().rsplit("processor seconds: ", 1)[1].strip()


def is_enough(points):
    """Whether there are three sizes with three lengths each, the least for a fit."""
    lengths = {}
    for size, length, *_ in points:
        lengths.setdefault(size, set()).add(length)
    return sum(len(found) >= 3 for found in lengths.values()) >= 3


def sizes_of(points):
    return [size for size in SIZES if any(point[0] == size for point in points)]


def only_copying(points):
    return [point for point in points if point[0] in COPYING]


# ----- fit.txt ------------------------------------------------------------------------------------------


def report_runs(points):
    """What was trained, and what it came to."""
    planned = sum(len(lengths) for _, _, factor, lengths in SERIES.values() if factor == 1)
    sizes = sizes_of(points)
    yield f"{len(points)} of {planned} runs are finished, {len(sizes)} of {len(SIZES)} sizes: " + (
        "the grid is complete." if len(points) == planned else "this is not a law yet."
    )
    yield ""
    yield "validation loss, nats per byte (seed 1 / seed 2)"
    found = {point[:3]: point[3] for point in points}
    yield "size      N" + "".join(f"{length:>17}" for length in GRID)
    for size in sizes:
        cells = [" / ".join(f"{found[size, d, s]:.4f}" for s in (1, 2) if (size, d, s) in found) for d in GRID]
        yield f"{size:6}{parameters(size) / 1e6:5.2f}M" + "".join(f"{cell:>17}" for cell in cells)
    noise, num_pairs, mean = seed_noise(points)
    if num_pairs:
        yield f"between seeds: standard deviation {noise:.4f}, of {num_pairs} pairs; seed 2 minus seed 1: {mean:+.4f}"
    yield ""
    for a, b in zip(sizes, sizes[1:]):
        gaps = {d: found[a, d, 1] - found[b, d, 1] for d in GRID if (a, d, 1) in found and (b, d, 1) in found}
        yield f"{a} minus {b}, seed 1, which the law wants to be the same for all lengths: " + ", ".join(
            f"{d} {gap:.4f}" for d, gap in gaps.items()
        )
    yield ""
    yield "rates: loss at half and at twice the rule's rate, minus that at the rule's"
    for name, (size, seed, factor, lengths) in SERIES.items():
        for length in lengths if factor != 1 else []:
            value, rule = kept_val(name, length), kept_val(f"{size}-seed{seed}", length)
            if value is not None and rule is not None:
                yield f"{size} {length} x {factor}: {value - rule:+.4f}"
    yield ""
    yield "processor seconds: the constant run, then each branch after it"
    for name in SERIES:
        spent = {path.parent.name: seconds_of(path) for path in (KEPT / name).glob("*/run.txt")}
        if spent:
            yield f"{name}: " + ", ".join(f"{part} {spent[part]}" for part in ("constant", *STEPS) if part in spent)


def report_fits(points):
    """The law for all sizes, with both ways to count N, and for those that copy early."""
    fits = {"N without embeddings, as declared": (points, False), "N with embeddings": (points, True)}
    fits["N without embeddings, of the three sizes that copy within 5M tokens"] = only_copying(points), False
    for title, (some_points, with_embeddings) in fits.items():
        N, D, L = arrays(some_points, with_embeddings)
        law = fit(N, D, L)
        yield f"{title}:"
        if law is None:
            yield "  no law with positive E, A and B"
            continue
        laws = bootstrap(some_points, with_embeddings)
        yield f"  rms of the residuals {law['rms']:.4f}; 90% intervals of {len(laws)} bootstrap samples"
        for key, digits in dict(E=3, a=3, b=3).items():
            yield f"  {key} {law[key]:.{digits}f} {interval([l[key] for l in laws], digits)}"
        yield f"  A {law['A']:.4g}, B {law['B']:.4g}"
        ratio = [l["b"] / (l["a"] + l["b"]) for l in laws]
        yield f"  compute-optimal N grows as C^{law['b'] / (law['a'] + law['b']):.2f} {interval(ratio, 2)}"
        for C in (1e13, 1e14, 1e15):
            n, d = optimum(law, C)
            some = [np.divide(*optimum(l, C)[::-1]) for l in laws]
            yield f"  C = {C:.0e}: N {n / 1e6:.2f}M, D {d / 1e6:.1f}M, D/N {d / n:.1f} {interval(some, 1)}, loss {loss(law, n, d):.3f}"


def report_checks(points):
    """How far the law holds: with E held, on points left out of the fit, point by point, and for the predicted run."""
    sizes = sizes_of(points)
    N, D, L = arrays(points)
    yield "held E, without embeddings: rms, a, b"
    for E in (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2):
        law = fit(N, D, L, E=E)
        yield f"  {E:.1f}: " + (f"{law['rms']:.4f}, {law['a']:.3f}, {law['b']:.3f}" if law else "no positive law")
    yield ""
    yield "held out: fitted without these points, their mean loss minus the prediction, and the rms of that"
    tests = {f"{sizes[-1]}": N == N.max(), "the longest runs": D == D.max(), "the shortest runs": D == D.min()}
    for name, out in tests.items():
        law = fit(N[~out], D[~out], L[~out]) if len(set(N[~out])) > 2 and len(set(D[~out])) > 2 else None
        if law:
            error = L[out] - loss(law, N[out], D[out])
            yield f"  {name}: {error.mean():+.4f}, {np.sqrt(np.mean(error**2)):.4f}"
    yield ""
    law = fit(N, D, L)
    if law:
        yield "residuals, without embeddings (seed 1 / seed 2)"
        yield "        " + "".join(f"{length:>18}" for length in GRID)
        for size in sizes:
            row = [[v - loss(law, parameters(s), tokens(d)) for s, d, _, v in points if (s, d) == (size, x)] for x in GRID]
            yield f"  {size:6}" + "".join(f"{' / '.join(f'{value:+.4f}' for value in cell):>18}" for cell in row)
    measured = kept_val(*PREDICTED)
    if measured is not None:
        n, d = parameters(PREDICTED_SIZE), tokens(PREDICTED[1])
        said = ", ".join(f"{loss(fit(*arrays(some)), n, d):.4f}" for some in (only_copying(points), points))
        yield f"{PREDICTED[0]} {PREDICTED[1]}: {measured:.4f}; the fits of the three sizes and of all say {said}"


# ----- The picture, and the prediction ------------------------------------------------------------------


def draw(points):
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    copying = only_copying(points)
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained", width_ratios=[1.5, 1, 1])
    left, *right = axes
    line = np.geomspace(tokens("2M"), tokens("48M"), 50)
    for some, ax, title in zip((points, copying), right, ("all five sizes", "the three that copy early")):
        N, D, L = arrays(some)
        law = fit(N, D, L) if is_enough(some) else None
        ax.axhline(0, color="#999999", linewidth=1)
        ax.set(title=f"residuals: {title}", ylim=(-0.055, 0.055))
        for size, color in COLORS.items():
            own = N == parameters(size)
            if some is points:
                left.plot(D[own] / 1e6, L[own], "o", color=color, markersize=4, label=f"{size}, N = {parameters(size) / 1e6:.2f}M")
            if law and own.any():
                ax.plot(D[own] / 1e6, L[own] - loss(law, N[own], D[own]), "o", color=color, markersize=4)
                if (some is copying) == (size in COPYING):
                    left.plot(line / 1e6, loss(law, parameters(size), line), color=color, linewidth=1)
    color = COLORS[PREDICTED_SIZE]
    if (said := HERE / "prediction.txt").exists():
        value, low, high = (float(x.strip("[],")) for x in said.read_text().split("\n")[0].split()[2:5])
        bars = [[value - low], [high - value]]
        left.errorbar(tokens("48M") / 1e6, value, yerr=bars, color=color, capsize=3, linewidth=1, label="predicted")
    if (measured := kept_val(*PREDICTED)) is not None:
        left.plot(tokens("48M") / 1e6, measured, "*", color=color, markersize=9, label="measured afterwards")
    left.set(ylabel="validation loss (nats per byte)")
    for ax in axes:
        ticks = [2, 4, 8, 16, 32] + [48] * (ax is left)
        ax.set(xlabel="training tokens (millions)", xscale="log", xticks=ticks, xticklabels=ticks)
        ax.minorticks_off()
        ax.grid(alpha=0.25)
    left.legend(frameon=False, fontsize=9)
    figure.savefig(HERE / "law.png", dpi=110)


def predict(points):
    """The lines of prediction.txt: what counts is that of the sizes that copy early, as the predicted one does."""
    n, d = parameters(PREDICTED_SIZE), tokens(PREDICTED[1])
    noise, lines = seed_noise(points)[0], []
    copying = only_copying(points)
    for name, some in {f"of {', '.join(COPYING)}": copying, "beside it, of all sizes": points}.items():
        law, laws = fit(*arrays(some)), bootstrap(some)
        # a new run also has the noise of its seed
        drawn = np.array([loss(l, n, d) for l in laws]) + np.random.default_rng(1).normal(0, noise, len(laws))
        lines.append(f"{PREDICTED[0]} {PREDICTED[1]}: {loss(law, n, d):.4f} {interval(drawn, 4)}, from {len(some)} runs {name}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="write prediction.txt")
    predicting = parser.parse_args().predict
    points = finished()
    if predicting:
        if len({point[0] for point in points}) < len(SIZES):
            sys.exit("error: the prediction needs runs of all five sizes. Finish them with runs.py first.")
        line = predict(points)
        (HERE / "prediction.txt").write_text(line + "\n")
        print(line)
        return
    lines = list(report_runs(points))
    if is_enough(points):
        lines += ["", *report_fits(points), "", *report_checks(points)]
    else:
        lines.append("Three sizes with three lengths each are needed for a fit.")
    text = "\n".join(lines) + "\n"
    (HERE / "fit.txt").write_text(text)
    print(text, end="")
    draw(points)


if __name__ == "__main__":
    main()

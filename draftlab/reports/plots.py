"""The report's plots as inline SVG. Text stays text, so the page's own font and escaping serve it.

matplotlib is imported on the first plot only: the rest of the report needs none of it.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftlab.evaluation.results import ArmResult, Estimate, EvalResult
from draftlab.reports import words

# told apart by the colour-blind, and in print by their order
COLOURS = ("#1f5f8b", "#c8702a", "#5a8f3c", "#8a5aa8", "#7a6a58")
_STAGES = (
    ("drafting", "#c8702a"),
    ("verification", "#1f5f8b"),
    ("commit", "#8aa4b8"),
    ("other", "#d5dbe1"),
)
_LEAST_TAU_TOP = 1.2  # of the axis
_INK = "#2b3540"
_GRID = "#e3e8ed"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.parse_math": False,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#aab4be",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def plot_tau_by_domain(result: EvalResult) -> str:
    """Draw tau of every drafter on every domain, with intervals, in the best drafter's order."""
    first = max(result.arms, key=lambda arm: arm.acceptance.tau.value or 0.0)
    order = sorted(first.domains, key=lambda d: d.acceptance.tau.value or 0.0)
    names = [domain.domain for domain in order]

    def draw(axes: Any) -> None:
        height = 0.62 / len(result.arms)
        for index, arm in enumerate(result.arms):
            by_name = {d.domain: d.acceptance.tau for d in arm.domains}
            offset = ((len(result.arms) - 1) / 2 - index) * height
            places = [i + offset for i in range(len(names))]
            taus = [by_name.get(name, Estimate(None, None, None, 0, "none")) for name in names]
            _points(axes, taus, places, COLOURS[index % len(COLOURS)], arm.name, horizontal=True)
        axes.axvline(1.0, color="#8a949e", linewidth=1, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.set_xlabel("tau, tokens a verify step (dashed: no drafter)")
        axes.grid(axis="x", color=_GRID)
        axes.tick_params(axis="y", length=0)
        _legend(axes, len(result.arms))

    return _svg("tau-by-domain", draw, width=9.0, height=0.3 * len(names) + 0.9)


def plot_alpha_by_depth(result: EvalResult) -> str:
    """Draw the conditional acceptance by depth."""

    def draw(axes: Any) -> None:
        deepest = 1
        for index, arm in enumerate(result.arms):
            alphas = arm.acceptance.alpha
            deepest = max(deepest, len(alphas))
            places = [k + 1 + 0.06 * index for k in range(len(alphas))]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(
                [p for p, a in zip(places, alphas, strict=True) if a.value is not None],
                [a.value for a in alphas if a.value is not None],
                color=colour,
            )
            _points(axes, alphas, places, colour, arm.name, horizontal=False)
        axes.set_xticks(range(1, deepest + 1))
        axes.set_ylim(0, 1.04)
        axes.set_xlabel("depth of the draft token")
        axes.set_ylabel("accepted, if reached (alpha)")
        axes.grid(axis="y", color=_GRID)
        _legend(axes, len(result.arms))

    return _svg("alpha-by-depth", draw)


def plot_emitted_histogram(result: EvalResult) -> str:
    """Draw the share of verify steps by tokens emitted."""

    def draw(axes: Any) -> None:
        width = 0.8 / len(result.arms)
        most = 1
        for index, arm in enumerate(result.arms):
            counts = arm.acceptance.emitted_histogram[1:]
            total = sum(counts) or 1
            most = max(most, len(counts))
            offset = (index - (len(result.arms) - 1) / 2) * width
            axes.bar(
                [i + 1 + offset for i in range(len(counts))],
                [c / total for c in counts],
                width=width * 0.92,
                color=COLOURS[index % len(COLOURS)],
                label=arm.name,
            )
        axes.set_xticks(range(1, most + 1))
        axes.set_xlabel("tokens emitted by a verify step")
        axes.set_ylabel("share of verify steps")
        axes.grid(axis="y", color=_GRID)
        _legend(axes, len(result.arms))

    return _svg("emitted", draw)


def plot_step_time(result: EvalResult) -> str:
    """Draw where the time of a step goes, per drafter and for plain decoding."""
    timed: list[tuple[ArmResult, Any]] = [(arm, arm.speed) for arm in result.arms if arm.speed]

    def draw(axes: Any) -> None:
        labels = ["no drafter"] + [f"{arm.name}, {words.draft_size(arm)}" for arm, _ in timed]
        baseline = timed[0][1].baseline_step_s
        rows = [(0.0, baseline, 0.0, 0.0)]
        rows += [
            (s.step.draft_s, s.step.verify_s, s.step.commit_s, s.step.other_s) for _, s in timed
        ]
        left = [0.0] * len(rows)
        for stage, (name, colour) in enumerate(_STAGES):
            widths = [1000 * row[stage] for row in rows]
            axes.barh(range(len(rows)), widths, left=left, color=colour, label=name, height=0.55)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        taus = [1.0] + [s.tau for _, s in timed]
        for place, (end, tau) in enumerate(zip(left, taus, strict=True)):
            axes.text(end, place, f"  {end:.1f} ms for {tau:.2f} tokens", va="center", fontsize=8.5)
        axes.set_yticks(range(len(rows)), labels)
        axes.invert_yaxis()
        axes.set_xlim(0, max(left) * 1.38)
        axes.set_xlabel("milliseconds a step at batch 1")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=_GRID)
        _legend(axes, 2)

    return _svg("step-time", draw, height=0.48 * (len(timed) + 1) + 1.15)


def plot_training(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Draw the training loss, and tau on validation prompts where it was probed."""
    loss = [(r["step"], r["train/loss"]) for r in metrics if r.get("train/loss") is not None]
    tau = [(r["step"], r["accept/tau"]) for r in metrics if r.get("accept/tau") is not None]

    def draw(axes: Any) -> None:
        axes.plot(*zip(*loss, strict=True), color=COLOURS[0], label="training loss")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("training loss")
        axes.grid(axis="y", color=_GRID)
        if tau:
            other = axes.twinx()
            other.spines["right"].set_visible(True)
            other.plot(
                *zip(*tau, strict=True), color=COLOURS[1], marker="o", markersize=4, label="tau"
            )
            other.set_ylabel("tau on validation prompts")
            # from no drafter upwards: else the last digit of two equal probes is a steep rise
            other.set_ylim(1.0, max(_LEAST_TAU_TOP, 1.05 * max(value for _, value in tau)))
            lines = [*axes.get_lines(), *other.get_lines()]
            axes.legend(
                lines,
                [str(line.get_label()) for line in lines],
                loc="lower right",
                bbox_to_anchor=(1.0, 1.0),
                ncols=2,
                borderaxespad=0.2,
            )

    return _svg("training", draw) if loss else ""


def _points(
    axes: Any,
    estimates: Sequence[Estimate],
    places: Sequence[float],
    colour: str,
    label: str,
    *,
    horizontal: bool,
) -> None:
    at, values, below, above = [], [], [], []
    for place, estimate in zip(places, estimates, strict=True):
        if estimate.value is not None:
            low, high = estimate.low, estimate.high
            at.append(place)
            values.append(estimate.value)
            below.append(0.0 if low is None else max(0.0, estimate.value - low))
            above.append(0.0 if high is None else max(0.0, high - estimate.value))
    bars = [below, above]
    style = {"fmt": "o", "markersize": 4.5, "color": colour, "elinewidth": 1.3, "label": label}
    if horizontal:
        axes.errorbar(values, at, xerr=bars, **style)
    else:
        axes.errorbar(at, values, yerr=bars, **style)


def _legend(axes: Any, num_entries: int) -> None:
    if num_entries > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, borderaxespad=0.2)


def _svg(name: str, draw: Callable[[Any], None], *, width: float = 5.6, height: float = 3.0) -> str:
    """Draw one figure and cut the SVG down to what may stand inside a page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # the salt keeps ids of two plots of a page apart, and equal from run to run
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # a style element inside one plot would style the whole page
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.strip()

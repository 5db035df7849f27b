"""The memory of a run over its course, as a picture: an image file, or a page that needs nothing else.

Reads the JSON that `oomfix.profile.run` writes; imports no torch. matplotlib comes with `pip install oomfix[plot]`.
"""

import html
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomfix.profile.text import grows, lines, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB, GIB = 2**20, 2**30
SUFFIXES = (".png", ".svg", ".html")

# what lasts is dark and lies at the bottom, what comes and goes is light and on top
_COLORS = {
    "weights": "#1b3a5c",
    "optimizer state": "#2f6690",
    "gradients": "#5a9bc4",
    "other": "#6d597a",
    "workspaces": "#8d99ae",
    "inputs": "#6a994e",
    "activations": "#f2a541",
    "temporaries": "#f7d08a",
}
_PHASES = {"forward": "#dcedc8", "backward": "#ffe0b2", "optimizer": "#d1c4e9"}
_ALARM, _FINE = "#c1121f", "#386641"
# narrower phases have no room for their name: the legend tells their colour
_NARROWEST_LABEL = 0.07
_NARROWEST_NUMBER = 0.025
# characters of a path that leave room for the verdict beside it
_LONGEST_NAME = 36
_ON_WHITE = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the picture of an estimate to `path`.

    Args:
        found: an estimate, with the keys of `Estimate.as_json` and those that `oomfix.profile.run` adds.
        path: a file that ends in .png, .svg or .html; the page holds the report as text besides.

    Raises:
        ValueError: the file's name ends otherwise.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"plot: got {path.name!r}, expected a name that ends in {', '.join(SUFFIXES)}")
    figure = picture(found)
    if path.suffix == ".html":
        path.write_text(_page(found, figure), encoding="utf-8")
    else:
        figure.savefig(path, dpi=160)


def picture(found: dict[str, Any]) -> "Figure":
    """The figure: allocated memory by category, what is reserved, the phases, the card's limit and the peak."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    moments = found["timeline"]
    unit, name_of_unit = (GIB, "GiB") if found["peak_reserved_bytes"] >= GIB else (MIB, "MiB")
    categories = [name for name in _COLORS if any(moment["breakdown"].get(name) for moment in moments)]
    heights = [[moment["breakdown"].get(name, 0) / unit for moment in moments] for name in categories]
    xs = range(len(moments))
    axes.stackplot(xs, heights, labels=categories, colors=[_COLORS[name] for name in categories], linewidth=0)
    reserved = [moment["reserved_bytes"] / unit for moment in moments]
    axes.plot(xs, reserved, color="#444444", linewidth=1, linestyle=":", label="reserved by torch")
    limit = _limit_bytes(found) / unit
    top = max([*reserved, *([limit] if limit < 4 * max(reserved) else [])]) * 1.22
    axes.set_xlim(0, len(moments) - 1)
    axes.set_ylim(0, top)
    _mark_phases(axes, moments, top)
    _mark_limit(axes, found, limit, top)
    _mark_peak(axes, found, moments, unit)
    axes.set_ylabel(f"GPU memory in {name_of_unit}")
    axes.set_xticks([])
    axes.set_xlabel("course of the run, in allocations and frees")
    script = found["script"]
    name = script if len(script) <= _LONGEST_NAME else f"...{script[-_LONGEST_NAME:]}"
    axes.set_title(f"{name} on {found['card']['name']}", loc="left", fontweight="bold")
    verdict, color = _verdict(found)
    axes.set_title(verdict, loc="right", color=color, fontweight="bold")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _add_legend(figure, axes, {moment["phase"] for moment in moments})
    return figure


def _add_legend(figure: "Figure", axes: "Axes", phases: set[str]) -> None:
    """What the colours mean, in the order in which they are stacked; the phases last."""
    from matplotlib.patches import Patch

    handles, names = axes.get_legend_handles_labels()
    strips = [name for name in _PHASES if name in phases]
    handles = [*handles[::-1], *(Patch(color=_PHASES[name]) for name in strips)]
    figure.legend(handles, [*names[::-1], *strips], loc="outside right center", frameon=False)


def _verdict(found: dict[str, Any]) -> tuple[str, str]:
    if found["out_of_memory"]:
        return "ran out of memory", _ALARM
    if not found["fits"]:
        return "ended early", _ALARM
    fits = found["fits"]["card"]["fits"]
    if grows(found):
        said = "fits so far" if fits else "does not fit"
        return f"{said}, grows {size(found['growth_bytes_per_step'])} per step", _ALARM
    return ("fits", _FINE) if fits else ("does not fit", _ALARM)


def _limit_bytes(found: dict[str, Any]) -> int:
    """What the allocator may reserve on the card: its capacity less the context, or the budget if that is less."""
    context: int = found["context_bytes"]
    on_card = int(found["card"]["capacity_gib"] * GIB) - context
    budget: int | None = found["budget_bytes"]
    return on_card if budget is None else min(on_card, budget)


def _mark_phases(axes: "Axes", moments: list[dict[str, Any]], top: float) -> None:
    """A strip of named phases along the upper edge, and a line where each step begins."""
    strip, width = 0.05 * top, len(moments) - 1
    for (_, phase), group in groupby(enumerate(moments), lambda item: (item[1]["step"], item[1]["phase"])):
        positions = [position for position, _ in group]
        start, end = positions[0], min(positions[-1] + 1, width)
        if phase not in _PHASES:
            continue
        axes.axvspan(start, end, color=_PHASES[phase], alpha=0.35, linewidth=0, zorder=0)
        axes.fill_between([start, end], top - strip, top, color=_PHASES[phase], linewidth=0)
        if (end - start) / width >= _NARROWEST_LABEL:
            axes.text((start + end) / 2, top - strip / 2, phase, ha="center", va="center", fontsize=8)
    for step, group in groupby(enumerate(moments), lambda item: item[1]["step"]):
        positions = [position for position, _ in group]
        start, share = positions[0], len(positions) / width
        if step > 1:
            axes.axvline(start, color="#666666", linewidth=0.8)
        # a narrow step has room for its number, a very narrow one for none
        label = f"step {step}" if share >= _NARROWEST_LABEL else str(step) if share >= _NARROWEST_NUMBER else ""
        axes.text(start + 0.006 * width, top - 1.25 * strip, label, va="top", fontsize=8, color="#444444")


def _mark_limit(axes: "Axes", found: dict[str, Any], limit: float, top: float) -> None:
    whose = "budget" if found["budget_bytes"] == _limit_bytes(found) else found["card"]["name"]
    words = f"{whose}: {size(_limit_bytes(found))} for tensors"
    if limit < top:
        axes.axhline(limit, color=_ALARM, linewidth=1.4)
        axes.text(0.995, limit + 0.012 * top, words, color=_ALARM, ha="right", va="bottom", fontsize=9,
                  transform=axes.get_yaxis_transform(), bbox=_ON_WHITE)  # fmt: skip
    else:
        axes.text(0.995, 0.86, f"{words}, far above", color=_ALARM, ha="right", fontsize=9, transform=axes.transAxes)


def _mark_peak(axes: "Axes", found: dict[str, Any], moments: list[dict[str, Any]], unit: int) -> None:
    totals = [sum(moment["breakdown"].values()) for moment in moments]
    position = max(range(len(totals)), key=totals.__getitem__)
    words = f"peak {size(found['peak_allocated_bytes'])}"
    if found["out_of_memory"]:
        # the story is the request that was refused, and it ends the run
        position, words = len(totals) - 1, found["out_of_memory"].split(". ")[1] + ": refused"
    left = position > len(totals) / 2
    axes.annotate(
        words,
        xy=(position, totals[position] / unit),
        xytext=(-28 if left else 28, 16),
        textcoords="offset points",
        ha="right" if left else "left",
        fontweight="bold",
        color=_ALARM if found["out_of_memory"] else "black",
        arrowprops={"arrowstyle": "-|>", "color": "#222222"},
        bbox=_ON_WHITE,
    )


def _page(found: dict[str, Any], figure: "Figure") -> str:
    drawing = StringIO()
    figure.savefig(drawing, format="svg")
    svg = drawing.getvalue()
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(found["script"])}</title>\n'
        "<style>body { max-width: 1100px; margin: 2em auto; font-family: sans-serif } svg { width: 100%; height: auto }"
        f"</style></head>\n<body>\n{svg[svg.index('<svg') :]}\n<pre>{html.escape(chr(10).join(lines(found)))}</pre>\n"
        "</body></html>\n"
    )

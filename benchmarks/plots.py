"""Plots as SVG text, for the pages of docs/. Pure: the same figures are the same file."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Final

from benchmarks.stats import percentile

_WIDTH: Final = 400
_HEIGHT: Final = 300
_LEFT: Final = 56
_TOP: Final = 34
_BOTTOM: Final = 44
#: Told apart by colour-blind readers, too.
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_DASHES: Final = ("", "6 3", "", "2 3")
_POINTS: Final = 200


@dataclass(frozen=True, slots=True)
class Curve:
    """A sample of positive values, in any order, and its name."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that are drawn over each other."""

    title: str
    curves: Sequence[Curve]


def curves_svg(panels: Sequence[Panel], x_label: str, y_label: str) -> str:
    """Draw of each sample which share of it is at most so much, over a logarithmic axis; panels beside each other."""
    width = len(panels) * (_WIDTH + _LEFT) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_TOP + _HEIGHT + _BOTTOM}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({_LEFT + number * (_WIDTH + _LEFT)},{_TOP})">')
        parts += _panel(panel, x_label, y_label if number == 0 else "")
        parts.append("</g>")
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, x_label: str, y_label: str) -> list[str]:
    everything = [value for curve in panel.curves for value in curve.values]
    low, high = log10(min(everything)), log10(max(everything))
    first, last = floor(low * 10) / 10, ceil(high * 10) / 10

    def x(value: float) -> float:
        return round((log10(value) - first) / max(last - first, 0.1) * _WIDTH, 1)

    def y(share: float) -> float:
        return round((1 - share) * _HEIGHT, 1)

    parts = [f'<text x="{_WIDTH / 2:g}" y="-12" text-anchor="middle" font-size="14">{escape(panel.title)}</text>']
    for tick in _ticks(10**first, 10**last):
        parts.append(f'<line x1="{x(tick)}" y1="0" x2="{x(tick)}" y2="{_HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(tick)}" y="{_HEIGHT + 16}" text-anchor="middle">{tick:g}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<line x1="0" y1="{y(share)}" x2="{_WIDTH}" y2="{y(share)}" stroke="#ddd"/>')
        parts.append(f'<text x="-6" y="{y(share) + 4:g}" text-anchor="end">{share:.0%}</text>')
    parts.append(f'<text x="{_WIDTH / 2:g}" y="{_HEIGHT + 36}" text-anchor="middle">{escape(x_label)}</text>')
    if y_label:
        turned = f'transform="translate(-42,{_HEIGHT / 2:g}) rotate(-90)"'
        parts.append(f'<text {turned} text-anchor="middle">{escape(y_label)}</text>')
    for number, curve in enumerate(panel.curves):
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
        style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        ordered = sorted(curve.values)
        shares = [step / _POINTS for step in range(_POINTS + 1)]
        points = " ".join(f"{x(percentile(ordered, share))},{y(share)}" for share in shares)
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        top = _HEIGHT - 18 * (len(panel.curves) - number)
        parts.append(f'<line x1="{_WIDTH - 190}" y1="{top}" x2="{_WIDTH - 166}" y2="{top}" {style}/>')
        parts.append(f'<text x="{_WIDTH - 160}" y="{top + 4}">{escape(curve.name)}</text>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten."""
    every = [step * 10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1) for step in (1, 2, 5)]
    return [tick for tick in every if low <= tick <= high]

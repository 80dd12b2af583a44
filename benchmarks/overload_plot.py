"""Lines over time as an SVG picture, written by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

_WIDTH: Final = 760
_HEIGHT: Final = 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 36
_COLOURS: Final = ("#c0392b", "#2471a3", "#1e8449", "#7d3c98")


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: a value for each second and line, and levels that are drawn dashed."""

    title: str
    lines: Mapping[str, Sequence[float | None]]
    levels: Mapping[str, float] = field(default_factory=dict)


def picture(panels: Sequence[Panel]) -> str:
    """Return the panels, one below the other."""
    height = _HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0 {number * _HEIGHT})">')
        parts.extend(_panel(panel))
        parts.append("</g>")
    parts.append("</svg>\n")
    return "\n".join(parts)


def _panel(panel: Panel) -> list[str]:
    values = [value for line in panel.lines.values() for value in line if value is not None]
    top = _round_up(max([*values, *panel.levels.values(), 1e-9]))
    seconds = max((len(line) for line in panel.lines.values()), default=1)

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / max(seconds, 1)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top

    parts = [f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(panel.title)}</text>']
    for step in range(5):
        value = top * step / 4
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    parts.extend(
        f'<text x="{x(at):.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{at} s</text>'
        for at in range(0, seconds + 1, max(1, seconds // 6))
    )
    for name, level in panel.levels.items():
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(level):.1f}" y2="{y(level):.1f}" stroke="#555" '
            f'stroke-dasharray="5 4"/><text x="{_WIDTH - _RIGHT}" y="{y(level) - 4:.1f}" text-anchor="end" '
            f'fill="#555">{escape(name)}</text>'
        )
    for number, (name, line) in enumerate(panel.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        for points in _unbroken(line):
            path = " ".join(f"{x(at + 0.5):.1f},{y(value):.1f}" for at, value in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(
            f'<text x="{_LEFT + 8 + 170 * number}" y="{_HEIGHT - 3}" fill="{colour}">&#8212; {escape(name)}</text>'
        )
    return parts


def _unbroken(line: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Return the parts of a line between gaps."""
    parts: list[list[tuple[int, float]]] = [[]]
    for at, value in enumerate(line):
        if value is None:
            parts.append([])
        else:
            parts[-1].append((at, value))
    return [part for part in parts if part]


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 6, 8 times a power of ten."""
    scale = 1e-6
    while True:
        for step in (1, 2, 4, 6, 8):
            if step * scale >= value:
                return round(step * scale, 9)
        scale *= 10

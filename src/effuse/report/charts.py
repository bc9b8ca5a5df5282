"""Line and point charts as SVG, sized to be read on a phone too."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from effuse.report.html import embedded, text
from effuse.report.words import number

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 38
PALETTE = ("#2f6aa8", "#b4560f", "#2f7d3b", "#8a3f9c", "#a3263c", "#5b6470")  # of charts outside of a page
COLOURS = len(PALETTE)
MOST = 250  # points that are drawn of a series
SAME = 1e-9  # the relative difference up to which values stand still
SMALLEST, LARGEST = 1e-300, 1e300  # sizes of numbers that can be divided and subtracted; beyond them is zero, or nothing


class Point(NamedTuple):
    x: float
    y: float
    tip: str = ""


class Series(NamedTuple):
    """Points that belong together; without a line they stand alone."""

    name: str
    points: Sequence[Point]
    line: bool = True


def chart(title: str, series: Sequence[Series], across: str, zero: bool = False) -> str:
    """A figure with its title, a key to several series, and a tooltip at every point; from zero on if wanted."""
    drawn = [Series(s.name, _thinned([p for p in s.points if abs(p.y) <= LARGEST]), s.line) for s in series]
    points = [point for s in drawn for point in s.points]
    if not points:
        return ""
    xs, ys = _ticks([p.x for p in points]), _ticks([*([0.0] if zero else []), *(p.y for p in points)])

    def x(value: float) -> float:
        return LEFT + (value - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - TOP - BOTTOM)

    marks = [_across(tick, y(tick)) for tick in ys]
    for i, tick in enumerate(xs):
        anchor = "end" if i == len(xs) - 1 else "middle"
        marks.append(
            f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{escape(_short(tick))}</text>'
        )
    marks.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{text(across)}</text>')
    for i, s in enumerate(drawn):
        placed = [(x(p.x), y(p.y)) for p in s.points]
        if s.line and len(placed) > 1:
            path = "L".join(f"{px:.1f} {py:.1f}" for px, py in placed)
            marks.append(f'<path class="k{i % COLOURS}" d="M{path}"/>')
        if not s.line or len(placed) < 30:
            marks += [
                f'<circle class="f{i % COLOURS}" cx="{px:.1f}" cy="{py:.1f}" r="{3 if s.line else 5}"/>' for px, py in placed
            ]
    tips = [[round(x(p.x), 1), round(y(p.y), 1), _tip(s, p, across, len(series) > 1)] for s in drawn for p in s.points]
    marks.append('<circle class="mark" r="5" fill="none" stroke="currentColor" visibility="hidden"/>')
    last = "; ".join(f"{s.name} ends at {number(s.points[-1].y)}" for s in drawn if s.points and s.line)
    label = f"{title} over {across}{f'; {last}' if last else ''}"
    return (
        f'<figure class="card"><h3>{text(title)}</h3>'
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12" aria-label="{text(label)}" '
        f'data-points="{escape(embedded(tips))}">\n' + "\n".join(marks) + f"\n</svg>{keys([s.name for s in drawn])}</figure>"
    )


def keys(names: Sequence[str]) -> str:
    """Which colour is which, where there are several."""
    if len(names) < 2:
        return ""
    spans = (f'<span><i class="key b{i % COLOURS}"></i>{text(name)}</span>' for i, name in enumerate(names))
    return f'<figcaption class="keys">{"".join(spans)}</figcaption>'


def _across(tick: float, y: float) -> str:
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return f'{line}<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(_short(tick))}</text>'


def _tip(series: Series, point: Point, across: str, named: bool) -> str:
    words = point.tip or f"{across} {_short(point.x)}"
    return f"{words}\n{f'{series.name} ' if named or not series.line else ''}{number(point.y)}"


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most so many points, the last one among them."""
    every = math.ceil(len(points) / MOST)
    return [p for i, p in enumerate(points) if (len(points) - 1 - i) % max(1, every) == 0]


def _ticks(values: Sequence[float]) -> list[float]:
    """Four to seven round numbers around all values."""
    low, high = min(values), max(values)
    most = max(abs(low), abs(high))
    if high - low <= SAME * most or most < SMALLEST:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if most >= SMALLEST else (0.0, 1.0)
    raw = (high - low) / 4
    whole = all(float(value).is_integer() for value in values)  # there is no half round
    raw = max(raw, 1.0) if whole else raw
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)) if power * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value:.6g}"


def standalone(figure: str) -> str:
    """The SVG of a figure, with colours of its own, for a notebook or a file."""
    start, end = figure.index("<svg") + len("<svg"), figure.index("</svg>")
    colours = "".join(f".k{i}{{stroke:{c};fill:none;stroke-width:2}}.f{i}{{fill:{c}}}" for i, c in enumerate(PALETTE))
    style = f"<style>{colours}.grid{{stroke:#bbb}}text{{font-family:sans-serif;fill:#777}}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg"{figure[start:end]}{style}</svg>'

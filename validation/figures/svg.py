"""A drawing as text: the few shapes that the figures need, in numbers that never vary."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

FONT = "Helvetica, Arial, sans-serif"
INK, FAINT = "#222222", "#bbbbbb"
COPY, COMPUTE = "#c4662a", "#2a6fb0"
Point = tuple[float, float]


class Drawing:
    """Collects shapes over a white ground.

    Args:
        width: Of the drawing, in user units, as all coordinates.
        title: What it shows.
        sources: Artifacts that it was drawn from, kept in its description.
    """

    def __init__(self, width: int, height: int, title: str, sources: Iterable[str]) -> None:
        listed = ", ".join(sources) or "no artifact yet"
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="{FONT}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<desc>Drawn from {escape(listed)}</desc>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def text(
        self,
        at: Point,
        text: str,
        *,
        size: int = 13,
        anchor: str = "start",
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        """Write a line of text with its base line at `at`."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{fill}"{weight}>{escape(text)}</text>'
        )

    def area(self, points: Iterable[Point], fill: str) -> None:
        """Fill a polygon."""
        self._parts.append(f'<polygon points="{_join(points)}" fill="{fill}"/>')

    def line(self, points: Iterable[Point], stroke: str = INK, *, dashes: str = "") -> None:
        """Draw a line through points."""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(
            f'<polyline points="{_join(points)}" fill="none" stroke="{stroke}" '
            f'stroke-width="1.5"{dashed}/>'
        )

    def dot(self, at: Point, fill: str) -> None:
        """Draw a point of a curve."""
        self._parts.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="3.5" fill="{fill}"/>')

    def finish(self) -> str:
        """Return the drawing."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def _join(points: Iterable[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def round_ticks(largest: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers from 0 to beyond `largest`."""
    if largest <= 0:
        return [0.0, 1.0]
    power = 1.0
    while power * 10 <= largest / count:
        power *= 10
    while power > largest / count:
        power /= 10
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * count >= largest)
    ticks = [0.0]
    while ticks[-1] < largest:
        ticks.append(round(ticks[-1] + step, 9))
    return ticks

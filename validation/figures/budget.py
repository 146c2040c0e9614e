"""Step time against the device memory that training may take, for 32B and 72B."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from validation.figures.svg import COMPUTE, COPY, FAINT, INK, Drawing, round_ticks
from validation.harness import classify
from validation.harness.arms import Run, choose

BUDGETS_GB = (4, 6, 8, 12, 16, 24)
_SHAPES = (("32b", "32B shape", COMPUTE), ("72b", "72B shape", COPY))
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 70, 730, 70, 360


@dataclass(frozen=True)
class Curve:
    """What was measured of one shape.

    Attributes:
        points: Budget in GB and median step in seconds.
        refused_gb: Budgets at which training did not run.
        resident_s: Median resident step; None where it was not measured.
    """

    label: str
    color: str
    points: list[tuple[int, float]]
    refused_gb: list[int]
    resident_s: float | None
    sources: list[str]


def make_curve(shape: str, label: str, color: str, runs: Sequence[Run]) -> Curve:
    """Collect a shape's arms, the newest run of each budget."""
    points, refused, sources = [], [], []
    for budget in BUDGETS_GB:
        found = choose(runs, "limit", f"{shape}-budget{budget}gb-512")
        found = [run for run in found if classify.is_telling(run.record)]
        if not found:
            continue
        sources.append(found[-1].path)
        step_s = _step_s(found[-1:])
        if step_s is None:
            refused.append(budget)
        else:
            points.append((budget, step_s))
    resident = choose(runs, "limit", f"{shape}-resident-512")
    sources += [run.path for run in resident]
    return Curve(label, color, points, refused, _step_s(resident), sources)


def _step_s(runs: Sequence[Run]) -> float | None:
    steps = [
        run.record["summary"]["step_ms"]["median"]
        for run in runs
        if classify.is_complete(run.record) and "step_ms" in run.record["summary"]
    ]
    return statistics.median(steps) / 1e3 if steps else None


def draw(runs: Sequence[Run]) -> str:
    """Return the figure as SVG."""
    curves = [make_curve(*shape, runs) for shape in _SHAPES]
    heights = [step for curve in curves for _, step in curve.points]
    heights += [curve.resident_s for curve in curves if curve.resident_s is not None]
    ticks = round_ticks(max(heights, default=1.0))
    sources = [path for curve in curves for path in curve.sources]
    drawing = Drawing(_WIDTH, _HEIGHT, "Step time against vram_budget, 512 tokens", sources)
    drawing.text((_LEFT, 26), "Step time against device memory", size=17, bold=True)
    drawing.text((_LEFT, 46), "seconds a step, 512 tokens, against vram_budget (GB)")
    scale_x = (_RIGHT - _LEFT) / (BUDGETS_GB[-1] + 2)
    scale_y = (_BOTTOM - _TOP) / ticks[-1]
    for tick in ticks:
        at = _BOTTOM - scale_y * tick
        drawing.line([(_LEFT, at), (_RIGHT, at)], FAINT if tick else INK)
        drawing.text((_LEFT - 8, at + 4), f"{tick:g}", size=12, anchor="end")
    for budget in BUDGETS_GB:
        at = _LEFT + scale_x * budget
        drawing.text((at, _BOTTOM + 20), f"{budget}", size=12, anchor="middle")
    for number, curve in enumerate(curves):
        _draw_curve(drawing, curve, number, (scale_x, scale_y))
    return drawing.finish()


def _draw_curve(drawing: Drawing, curve: Curve, number: int, scales: tuple[float, float]) -> None:
    scale_x, scale_y = scales
    points = [(_LEFT + scale_x * gb, _BOTTOM - scale_y * step) for gb, step in curve.points]
    if len(points) > 1:
        drawing.line(points, curve.color)
    for point in points:
        drawing.dot(point, curve.color)
    for budget in curve.refused_gb:
        at = (_LEFT + scale_x * budget, _BOTTOM - 6 - 14 * number)
        drawing.text(at, "x", anchor="middle", fill=curve.color, bold=True)
    note = "" if curve.points else ": not measured yet"
    if curve.resident_s is not None:
        at_y = _BOTTOM - scale_y * curve.resident_s
        drawing.line([(_LEFT, at_y), (_RIGHT, at_y)], curve.color, dashes="5 4")
        note += "; dashed: resident"
    if curve.refused_gb:
        note += "; x: did not fit"
    at = (_LEFT + 330 * number, _HEIGHT - 14)
    drawing.text(at, f"{curve.label}{note}", fill=curve.color, bold=True)

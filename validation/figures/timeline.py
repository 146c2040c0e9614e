"""One optimizer step in time: copies and compute, resident, streamed, and streamed with graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from validation.figures.svg import COMPUTE, COPY, FAINT, INK, Drawing, round_ticks
from validation.harness.arms import Run, choose

RESIDENT, STREAMED = "32b-resident-512", "32b-auto-512"
_WIDTH, _LEFT, _RIGHT = 900, 20, 880
_TOP, _PANEL, _LANE = 74, 128, 34


@dataclass(frozen=True)
class Panel:
    """One step.

    Attributes:
        timeline: The profiled step; None where there is none yet.
        step: The same run's record of the limit protocol, with the unprofiled times.
    """

    title: str
    timeline: Run | None
    step: Run | None


def choose_panels(runs: Sequence[Run]) -> list[Panel]:
    """Take the newest step of each kind."""
    resident = choose(runs, "timeline", RESIDENT)
    streamed = choose(runs, "timeline", STREAMED)
    kinds = (
        ("Resident, the usual way: TRL, PEFT, bitsandbytes", resident),
        ("Streamed, kernels launched one by one", _with_graphs(streamed, has=False)),
        ("Streamed, one CUDA graph per layer and direction", _with_graphs(streamed, has=True)),
    )
    return [_make_panel(title, found[-1] if found else None, runs) for title, found in kinds]


def _with_graphs(runs: Sequence[Run], *, has: bool) -> list[Run]:
    return [run for run in runs if run.record["checks"]["has_graphs"] is has]


def _make_panel(title: str, timeline: Run | None, runs: Sequence[Run]) -> Panel:
    if timeline is None:
        return Panel(title, None, None)
    steps = choose(runs, "limit", timeline.record["arm"])
    same = [run for run in steps if run.record["started"] == timeline.record["started"]]
    return Panel(title, timeline, same[-1] if same else None)


def draw(runs: Sequence[Run]) -> str:
    """Return the figure as SVG."""
    panels = choose_panels(runs)
    known = [panel.timeline for panel in panels if panel.timeline is not None]
    ends = [run.record["samples"][-1]["end_ms"] for run in known]
    ticks = round_ticks(max(ends, default=1000.0))
    sources = [run.path for panel in panels for run in (panel.timeline, panel.step) if run]
    height = _TOP + _PANEL * len(panels) + 40
    drawing = Drawing(_WIDTH, height, "One optimizer step of a 32B model, 512 tokens", sources)
    drawing.text((_LEFT, 26), "One optimizer step, 32B shape, 512 tokens", size=17, bold=True)
    drawing.text((_LEFT, 48), "host-to-device copies", fill=COPY, bold=True)
    drawing.text((_LEFT + 175, 48), "compute", fill=COMPUTE, bold=True)
    drawing.text((_LEFT + 250, 48), "height: share of the time in which the device is at it")
    scale = (_RIGHT - _LEFT) / ticks[-1]
    for number, panel in enumerate(panels):
        _draw_panel(drawing, panel, _TOP + number * _PANEL, scale)
    _draw_axis(drawing, ticks, scale, _TOP + _PANEL * len(panels))
    return drawing.finish()


def _draw_panel(drawing: Drawing, panel: Panel, top: float, scale: float) -> None:
    drawing.text((_LEFT, top + 14), panel.title, bold=True)
    if panel.timeline is None:
        drawing.text((_LEFT, top + 60), "not measured yet", fill=FAINT)
        return
    samples = panel.timeline.record["samples"]
    drawing.text((_RIGHT, top + 14), _describe(panel), anchor="end")
    for lane, (field, color) in enumerate((("copy_share", COPY), ("compute_share", COMPUTE))):
        base = top + 26 + _LANE * (lane + 1) + 4 * lane
        drawing.line([(_LEFT, base), (_RIGHT, base)], FAINT)
        if any(sample[field] for sample in samples):
            drawing.area(_outline(samples, field, base, scale), color)


def _outline(
    samples: Sequence[Mapping[str, Any]], field: str, base: float, scale: float
) -> list[tuple[float, float]]:
    points = [(_LEFT, base)]
    for sample in samples:
        height = base - _LANE * sample[field]
        points += [(_LEFT + scale * sample[key], height) for key in ("begin_ms", "end_ms")]
    return [*points, (points[-1][0], base)]


def _describe(panel: Panel) -> str:
    if panel.step is None:
        return ""
    summary = panel.step.record["summary"]
    launches = summary["num_launches"]["median"]
    return (
        f"{summary['step_ms']['median']:.0f} ms a step without the profiler, "
        f"{launches:,.0f} launches"
    )


def _draw_axis(drawing: Drawing, ticks: Sequence[float], scale: float, top: float) -> None:
    drawing.line([(_LEFT, top), (_RIGHT, top)], INK)
    for tick in ticks:
        at = _LEFT + scale * tick
        drawing.line([(at, top), (at, top + 5)], INK)
        anchor = "start" if tick == 0 else "end" if tick == ticks[-1] else "middle"
        drawing.text((at, top + 20), f"{tick:g} ms", size=12, anchor=anchor)

"""Questions about a plan: what each setting would change, what fits on which card. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from poros_hf.errors import CapacityError
from poros_hf.fitting import Job, Plan, cheapest, fit, with_value
from poros_hf.planner import block_size
from poros_hf.units import GB, GIB, MIB, format_bytes

# Sizes that cards are sold with, GiB.
COMMON_CARDS_GIB = (8, 12, 16, 24)
# [Note: what a card has for training] The driver's context and kernels, and the margin that
# `vram_budget="auto"` leaves for the desktop: a twentieth of the card, at least half a GiB.
CONTEXT_BYTES = 512 * MIB
MARGIN_SHARE = 0.05
LEAST_MARGIN_BYTES = 512 * MIB
_TOKEN_STEP = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobChange:
    """What one setting, changed alone, does to a plan.

    Attributes:
        needed_bytes: Least device memory with which it runs.
        moved_bytes: Per optimizer step, within the budget if there is one; None where that is too
            small.
        least_ms: The same, of what is known of a step's time.
    """

    name: str
    before: int
    after: int
    needed_bytes: int
    moved_bytes: int | None
    least_ms: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFit:
    """What one size of card can do.

    Attributes:
        budget_bytes: What is left for training; see [Note: what a card has for training].
        plan: None where the job does not fit.
        longest_tokens: Longest row that fits, one at a time; 0 where none does.
    """

    card_bytes: int
    budget_bytes: int
    plan: Plan | None
    longest_tokens: int


def margin_bytes(card_bytes: int) -> int:
    """Return what is left free on a card for the desktop."""
    return max(LEAST_MARGIN_BYTES, int(MARGIN_SHARE * card_bytes))


def card_budget(card_bytes: int) -> int:
    """Return what a card of a size, with nothing else on it, has for training."""
    return card_bytes - margin_bytes(card_bytes) - CONTEXT_BYTES


def knob_changes(plan: Plan) -> list[KnobChange]:
    """Return what doubling or halving each setting does, one at a time."""
    job, config = plan.job, plan.job.config
    size, slots = block_size(config), plan.stream.num_slots
    wishes = [
        ("block_size", size, 2 * size),
        ("num_slots", slots, slots + 1),
        ("per_device_train_batch_size", job.workload.rows, 2 * job.workload.rows),
        ("max_length", job.workload.tokens, 2 * job.workload.tokens),
        ("max_length", job.workload.tokens, max(1, job.workload.tokens // 2)),
        ("r", job.workload.rank, 2 * job.workload.rank),
    ]
    return [_change(replace(job, blocks=None), *wish) for wish in wishes if wish[1] != wish[2]]


def least_bytes(job: Job) -> int:
    """Return the least device memory with which a job runs, whatever its budget is."""
    return cheapest(replace(job, hardware=replace(job.hardware, vram_bytes=None))).needed_bytes


def _change(job: Job, name: str, before: int, after: int) -> KnobChange:
    changed = with_value(job, name, after)
    plan = _fit_or_none(changed)
    return KnobChange(
        name=name,
        before=before,
        after=after,
        needed_bytes=least_bytes(changed),
        moved_bytes=None if plan is None else plan.moved_bytes,
        least_ms=None if plan is None else plan.least_ms,
    )


def fit_cards(job: Job, cards: Sequence[int], most_tokens: int) -> list[CardFit]:
    """Say for each size of card whether a job fits, and how long its rows could be.

    Args:
        job: Its own budget is not looked at.
        cards: Bytes of each card.
        most_tokens: Longest row that the model takes.
    """
    fits = []
    for card in cards:
        budget = card_budget(card)
        on_card = replace(job, hardware=replace(job.hardware, vram_bytes=budget))
        single = replace(on_card, workload=replace(job.workload, rows=1))
        fits.append(
            CardFit(
                card_bytes=card,
                budget_bytes=budget,
                plan=_fit_or_none(on_card),
                longest_tokens=longest_that_fits(single, budget, most_tokens),
            )
        )
    return fits


def longest_that_fits(job: Job, budget: int, most_tokens: int) -> int:
    """Return the longest row, a multiple of 64 tokens, with which a job fits; 0 where none does."""
    low, high = 0, most_tokens // _TOKEN_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if cheapest(with_value(job, "max_length", middle * _TOKEN_STEP)).needed_bytes <= budget:
            low = middle
        else:
            high = middle - 1
    return low * _TOKEN_STEP


def _fit_or_none(job: Job) -> Plan | None:
    try:
        return fit(job)
    except CapacityError:
        return None


def describe(plan: Plan) -> str:
    """Write a plan for people: bytes by category, what is moved, how long a step takes."""
    workload, hardware, stream = plan.job.workload, plan.job.hardware, plan.stream
    lines = [
        f"{plan.job.shapes.name}: {workload.rows} x {workload.tokens} tokens, "
        f"{workload.accumulation} per optimizer step, LoRA rank {workload.rank}",
        f"  {stream.num_blocks} blocks of {format_bytes(max(stream.block_bytes))}: "
        f"{stream.num_slots} slots, {len(stream.resident)} resident, head "
        f"{'on the device' if plan.is_head_resident else 'in host memory'}",
        "",
    ]
    categories = {name: size for name, size in asdict(plan.device).items() if size}
    categories |= {"margin": plan.margin_bytes}
    lines += [
        f"  {name.replace('_', ' '):<20}{size / GIB:>9.3f} GiB" for name, size in categories.items()
    ]
    budget = "" if hardware.vram_bytes is None else f" of {format_bytes(hardware.vram_bytes)}"
    lines += [
        f"  {'device memory':<20}{plan.needed_bytes / GIB:>9.3f} GiB{budget}",
        f"  {'host memory':<20}{plan.host_bytes / GIB:>9.3f} GiB, page-locked",
        f"  {'moved per step':<20}{plan.moved_bytes / GB:>9.3f} GB, host to device",
        f"  {'time per step':<20}{_times(plan)}",
    ]
    return "\n".join(lines)


def _times(plan: Plan) -> str:
    link, kernels = plan.link_ms, plan.compute_ms
    if link is None:
        return "  not known without the link's rate (`poros doctor` measures it; --link-gbps)"
    copies = f"{link:9.0f} ms of copies"
    if kernels is None:
        return f"{copies}; kernels are not known without the card's rates"
    return f"{copies}, {kernels:.0f} ms of kernels: {plan.step_ms:.0f} ms"

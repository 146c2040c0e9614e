"""From a budget to a plan: what stays on the device, what is moved, and how long a step takes.

Pure. The cheapest plan holds `num_slots` blocks and nothing else; what the budget has left goes to
the head first, because it is moved twice for each few thousand tokens and nothing hides it, and
then to resident blocks. Fewer bytes moved is never slower, on any link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from poros_hf.config import PorosConfig
from poros_hf.errors import CapacityError
from poros_hf.memory import HEAD_TILE_TOKENS, DeviceBytes, Placement, estimate
from poros_hf.planner import StreamPlan, block_size, plan_stream
from poros_hf.shapes import Hardware, ModelShapes, Workload
from poros_hf.units import MIB, format_bytes

# What the allocator holds beyond what is in use: of what comes and goes in a step, and always.
# Source: reserved - allocated in validation/artifacts/parity, 32B and 72B shapes, with room above:
# those runs had no records of layers, whose pool is counted in whole segments.
_FRAGMENT_SHARE = 0.75
_FRAGMENT_BYTES = 192 * MIB
# Dequantising reads half a byte and writes two, in forward, recompute and backward.
_DEQUANTISED_BYTES_PER_WEIGHT = 3 * 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """All that a plan is made from.

    Attributes:
        blocks: Packed bytes of each block; None computes them from the shapes.
    """

    shapes: ModelShapes
    config: PorosConfig
    workload: Workload
    hardware: Hardware
    blocks: tuple[int, ...] | None = None

    @property
    def uses_graphs(self) -> bool:
        """Whether layers are replayed from records of their kernels."""
        return self.shapes.can_replay and self.workload.is_checkpointed

    @property
    def placed_workload(self) -> Workload:
        """The workload with the rows that the config lets through a layer at a time."""
        rows = self.config.micro_batch_size
        return self.workload if rows == "auto" else replace(self.workload, micro_rows=rows)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Packed bytes of each block."""
        if self.blocks is not None:
            return self.blocks
        size = block_size(self.config)
        return self.shapes.block_bytes(size, double_quant=self.config.double_quant)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a training will take and how fast it can be; made by `poros_hf.plan`.

    Attributes:
        job: What it was made from.
        stream: Slots and resident blocks.
        is_head_resident: The device keeps the head, or the one matrix of tied embeddings.
        device: Predicted peak by category, as `torch.cuda.max_memory_allocated` counts, with the
            pools of captured graphs. The CUDA context stands beside it.
        margin_bytes: What the allocator may hold beyond that.
    """

    job: Job
    stream: StreamPlan
    is_head_resident: bool
    device: DeviceBytes
    margin_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Device memory that has to be there: the peak and the margin."""
        return self.device.total + self.margin_bytes

    @property
    def host_bytes(self) -> int:
        """Page-locked host memory of the store."""
        shapes = self.job.shapes
        head = shapes.embedding_bytes + shapes.head_bytes if shapes.can_stream_head else 0
        return sum(self.stream.block_bytes) + head

    @property
    def moved_bytes(self) -> int:
        """Host to device in one optimizer step, in steady state."""
        return self.job.workload.accumulation * (
            self.stream.moved_bytes_per_step + self._moved_head_bytes
        )

    @property
    def _moved_head_bytes(self) -> int:
        shapes, tokens = self.job.shapes, self.job.workload.batch_tokens
        if self.is_head_resident or not shapes.can_stream_head:
            return 0
        return 2 * -(-tokens // HEAD_TILE_TOKENS) * (shapes.head_bytes or shapes.embedding_bytes)

    @property
    def link_ms(self) -> float | None:
        """Time of the copies of one optimizer step, where the link's rate is known."""
        rate = self.job.hardware.link_gbps
        return None if rate is None else self.moved_bytes / rate / 1e6

    @property
    def compute_ms(self) -> float | None:
        """Time of the kernels of one optimizer step, where the device's rates are known."""
        return compute_ms(self.job.shapes, self.job.workload, self.job.hardware)

    @property
    def step_ms(self) -> float | None:
        """Predicted optimizer step: the longer of copies and kernels, where both are known."""
        if self.link_ms is None or self.compute_ms is None:
            return None
        return max(self.link_ms, self.compute_ms)

    @property
    def least_ms(self) -> float | None:
        """What is known of the time of a step: `step_ms`, or the copies alone."""
        return self.link_ms if self.step_ms is None else self.step_ms

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers with their units in their names, ready for JSON."""
        workload = self.job.workload
        return {
            "model": self.job.shapes.name,
            "config": self.job.config.to_dict(),
            "workload": asdict(workload),
            "hardware": asdict(self.job.hardware),
            "num_blocks": self.stream.num_blocks,
            "num_slots": self.stream.num_slots,
            "resident_blocks": list(self.stream.resident),
            "is_head_resident": self.is_head_resident,
            "device_bytes": asdict(self.device),
            "peak_bytes": self.device.total,
            "margin_bytes": self.margin_bytes,
            "needed_bytes": self.needed_bytes,
            "host_bytes": self.host_bytes,
            "moved_bytes_per_step": self.moved_bytes,
            "link_ms": self.link_ms,
            "compute_ms": self.compute_ms,
            "step_ms": self.step_ms,
        }


def compute_ms(shapes: ModelShapes, workload: Workload, hardware: Hardware) -> float | None:
    """Return the time of one optimizer step's kernels, launches left out.

    Forward, recompute and the gradient of the input are one product each; attention is causal.
    """
    if hardware.matmul_tflops is None or hardware.memory_gbps is None:
        return None
    tokens = workload.batch_tokens
    head = shapes.vocab_size * shapes.hidden_size
    attention = 9 * shapes.num_layers * shapes.hidden_size * workload.tokens
    operations = tokens * (6 * (shapes.num_weights + head) + attention)
    dequantised = _DEQUANTISED_BYTES_PER_WEIGHT * shapes.num_weights
    seconds = operations / hardware.matmul_tflops / 1e12 + dequantised / hardware.memory_gbps / 1e9
    return 1e3 * workload.accumulation * seconds


def fit(job: Job) -> Plan:
    """Choose slots, resident blocks and the place of the head.

    Without a budget nothing but the slots, and the blocks that the config names, is on the device.

    Raises:
        CapacityError: Even the cheapest plan is over the budget, or the store over the RAM; the
            details have the bytes, and the values with which it would fit.
        ConfigError: More resident blocks are asked for than there are.
    """
    plan = cheapest(job)
    _refuse_small_ram(plan)
    budget = job.hardware.vram_bytes
    if budget is None:
        return plan
    if plan.needed_bytes > budget:
        raise _too_small(plan, budget)
    if job.shapes.can_stream_head and job.config.resident_blocks != 0:
        with_head = _plan_for(job, plan.stream, is_head_resident=True)
        if with_head.needed_bytes <= budget:
            plan = with_head
    return _fill(plan, budget) if job.config.resident_blocks == "auto" else plan


def cheapest(job: Job) -> Plan:
    """Return the plan with the least device memory that the config allows.

    One slot is taken where the budget does not have two and the config does not name a number:
    copies then wait for compute.
    """
    plan = _plan_for(job, plan_stream(job.block_bytes, job.config), is_head_resident=False)
    budget = job.hardware.vram_bytes
    if budget is None or plan.needed_bytes <= budget or job.config.num_slots != "auto":
        return plan
    one = plan_stream(job.block_bytes, replace(job.config, num_slots=1))
    return _plan_for(job, one, is_head_resident=False)


def _fill(plan: Plan, budget: int) -> Plan:
    """Return the plan with as many resident blocks as the budget has room for."""
    config = replace(plan.job.config, num_slots=max(1, plan.stream.num_slots))
    low, high = 0, plan.stream.num_blocks
    while low < high:
        middle = (low + high + 1) // 2
        stream = plan_stream(plan.job.block_bytes, replace(config, resident_blocks=middle))
        tried = _plan_for(plan.job, stream, is_head_resident=plan.is_head_resident)
        if tried.needed_bytes <= budget:
            low, plan = middle, tried
        else:
            high = middle - 1
    return plan


def _plan_for(job: Job, stream: StreamPlan, *, is_head_resident: bool) -> Plan:
    sizes = stream.slot_bytes
    placement = Placement(
        slot_bytes=sum(sizes[: stream.num_slots]),
        resident_bytes=sum(sizes[stream.num_slots :]),
        is_head_resident=is_head_resident or not job.shapes.can_stream_head,
        uses_graphs=job.uses_graphs,
    )
    device = estimate(job.shapes, job.placed_workload, placement)
    moving = device.recompute + device.head
    return Plan(
        job=job,
        stream=replace(stream, is_head_resident=is_head_resident),
        is_head_resident=placement.is_head_resident,
        device=device,
        margin_bytes=round(_FRAGMENT_SHARE * moving) + _FRAGMENT_BYTES,
    )


def without_excess(plan: Plan, peak_bytes: int) -> StreamPlan | None:
    """Return the stream plan with fewer resident blocks, if a measured peak asks for it.

    Args:
        plan: Made for a budget.
        peak_bytes: Most that was allocated in the first step.

    Returns:
        None where the budget holds, or no block is resident.
    """
    budget = plan.job.hardware.vram_bytes
    excess = 0 if budget is None else peak_bytes + plan.margin_bytes - budget
    resident = len(plan.stream.resident)
    if excess <= 0 or resident == 0:
        return None
    too_many = -(-excess // max(plan.stream.block_bytes))
    config = replace(
        plan.job.config,
        num_slots=max(1, plan.stream.num_slots),
        resident_blocks=max(0, resident - too_many),
    )
    stream = plan_stream(plan.stream.block_bytes, config)
    return replace(stream, is_head_resident=plan.stream.is_head_resident)


# Rungs of the ladder: what may be lowered when memory runs out, in the order that costs least.
_WORKLOAD_FIELDS = {
    "per_device_train_batch_size": "rows",
    "max_length": "tokens",
    "r": "rank",
    "activation_offloading": "offloads_activations",
}


def values_that_fit(job: Job, budget: int) -> dict[str, int]:
    """Return, for each setting alone, the largest smaller value with which the job fits.

    Settings that cannot help alone are left out.
    """
    rungs: dict[str, Sequence[int]] = {
        "block_size": _halves(block_size(job.config)) if job.blocks is None else (),
        "num_slots": range(plan_stream(job.block_bytes, job.config).num_slots - 1, 0, -1),
        "resident_blocks": range(_named_blocks(job) - 1, -1, -1),
        "micro_batch_size": range(_micro_rows(job) - 1, 0, -1) if job.uses_graphs else (),
        "per_device_train_batch_size": range(job.workload.rows - 1, 0, -1),
        "max_length": range((job.workload.tokens - 1) // 64 * 64, 0, -64),
        "r": _halves(job.workload.rank),
        "activation_offloading": _offloading(job),
    }
    found = {}
    for name, values in rungs.items():
        fitting = _first_that_fits(job, name, values, budget)
        if fitting is not None:
            found[name] = fitting
    return found


def with_value(job: Job, name: str, value: int) -> Job:
    """Return the job with one setting, by its name in YAML, changed."""
    if name in ("block_size", "num_slots", "resident_blocks", "micro_batch_size"):
        return replace(job, config=replace(job.config, **{name: value}))  # type: ignore[arg-type]
    field = _WORKLOAD_FIELDS[name]
    return replace(job, workload=job.workload.of(**{field: value}))


def _first_that_fits(job: Job, name: str, values: Sequence[int], budget: int) -> int | None:
    """Return the first of falling values that fits; memory never grows as they fall."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if cheapest(with_value(job, name, values[middle])).needed_bytes <= budget:
            high = middle
        else:
            low = middle + 1
    return values[low] if low < len(values) else None


def _offloading(job: Job) -> Sequence[int]:
    """Return the switch that moves boundaries to the host, where it does something."""
    return (True,) if job.uses_graphs and not job.workload.offloads_activations else ()


def _halves(value: int) -> list[int]:
    halves = []
    while value > 1:
        value //= 2
        halves.append(value)
    return halves


def _micro_rows(job: Job) -> int:
    return job.placed_workload.micro_rows or job.workload.rows


def _named_blocks(job: Job) -> int:
    return 0 if job.config.resident_blocks == "auto" else job.config.resident_blocks


def _too_small(plan: Plan, budget: int) -> CapacityError:
    fitting = values_that_fit(plan.job, budget)
    short = plan.needed_bytes - budget
    largest = sorted(asdict(plan.device).items(), key=lambda item: -item[1])[:4]
    held = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in largest)
    remedies = [f"set {name}={value}" for name, value in fitting.items()]
    if not remedies and plan.job.config.vram_budget != "auto":
        remedies = [f"raise vram_budget to {format_bytes(plan.needed_bytes)} or more"]
    return CapacityError(
        "vram-budget",
        f"training {plan.job.shapes.name} needs {format_bytes(plan.needed_bytes)} of device "
        f"memory, available {format_bytes(budget)}, short by {format_bytes(short)}; most of it: "
        f"{held}",
        remedies=remedies or ["use a smaller model, or a card with more memory"],
        needed_bytes=plan.needed_bytes,
        available_bytes=budget,
        short_bytes=short,
        fits=fitting,
    )


def _refuse_small_ram(plan: Plan) -> None:
    ram = plan.job.hardware.ram_bytes
    if ram is None or plan.host_bytes <= ram:
        return
    raise CapacityError(
        "ram-budget",
        f"the host store of {plan.job.shapes.name} needs {format_bytes(plan.host_bytes)} of RAM, "
        f"available {format_bytes(ram)}, short by {format_bytes(plan.host_bytes - ram)}",
        remedies=["add RAM or raise the container's memory limit", "use a smaller model"],
        needed_bytes=plan.host_bytes,
        available_bytes=ram,
        short_bytes=plan.host_bytes - ram,
    )

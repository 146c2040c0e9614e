"""Plans for transformers models: `poros_hf.plan`, and the two plans that a training makes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from poros_hf.config import PorosConfig
from poros_hf.environment import DeviceMemory, read_device_memory
from poros_hf.fitting import Job as PlanJob
from poros_hf.fitting import Plan, fit
from poros_hf.hf.model_shapes import shapes_from_config, shapes_of_model
from poros_hf.shapes import Hardware, ModelShapes, Workload
from poros_hf.survey import margin_bytes
from poros_hf.units import format_bytes

logger = logging.getLogger(__name__)


def plan(
    model: Any,
    config: PorosConfig | None = None,
    *,
    workload: Workload | None = None,
    hardware: Hardware | None = None,
) -> Plan:
    """Say what a training will take and how fast it can be; reads no weight and no hardware.

    Args:
        model: ModelShapes, or a transformers config such as `AutoConfig.from_pretrained` gives.
        config: How it is quantised and streamed, PorosConfig() by default. A `vram_budget` with a
            size is used where `hardware` has none.
        workload: Rows, tokens, rank and optimizer; `workload_of` reads them from an SFTConfig and a
            LoraConfig. One row of 1024 tokens by default.
        hardware: Memory and rates. Without memory the cheapest plan is made, without rates its
            times are None.

    Raises:
        CapacityError: The budget or the RAM is too small; the details say which values would fit.
        UnsupportedModelError: The model cannot be streamed.
        ConfigError: The config does not fit the model.
    """
    config = config or PorosConfig()
    shapes = model if isinstance(model, ModelShapes) else shapes_from_config(model, config)
    hardware = hardware or Hardware()
    if hardware.vram_bytes is None and config.vram_budget_bytes is not None:
        hardware = replace(hardware, vram_bytes=config.vram_budget_bytes)
    return fit(
        PlanJob(shapes=shapes, config=config, workload=workload or Workload(), hardware=hardware)
    )


def workload_of(arguments: Any, lora: Any) -> Workload:
    """Return the workload that an SFTConfig and a LoraConfig describe.

    Rows are taken to be `max_length` long; without it, 1024 tokens. TRL trains adapters of 4-bit
    models in bfloat16, whatever the arguments say.
    """
    targets = lora.target_modules
    is_all = targets is None or isinstance(targets, str)
    return Workload(
        rows=arguments.per_device_train_batch_size,
        tokens=arguments.max_length or Workload().tokens,
        accumulation=arguments.gradient_accumulation_steps,
        rank=lora.r,
        targets="all-linear" if is_all else tuple(sorted(targets)),
        optimizer=str(getattr(arguments.optim, "value", arguments.optim)),
        is_checkpointed=bool(arguments.gradient_checkpointing),
        offloads_activations=bool(getattr(arguments, "activation_offloading", False)),
    )


def final_plan(
    model: Any, config: PorosConfig, blocks: tuple[int, ...], arguments: Any, rows: Any
) -> Plan | None:
    """Make the plan that training runs with: everything it depends on is known by now.

    Args:
        model: Streamed, with its adapter.
        config: The policy.
        blocks: Packed bytes of each block.
        arguments: The Trainer's.
        rows: What it trains on, tokenised.

    Returns:
        The plan; None where there is nothing to plan for, because there is no budget (training on
        the CPU without one) or because the length of the rows is not known.

    Raises:
        CapacityError: The budget is too small; the details say which values would fit.
    """
    budget = budget_bytes(config, read_device_memory())
    if budget is None:
        return None
    tokens = longest_row(arguments, rows)
    if tokens is None:
        logger.info("the length of the rows is not known: no block is kept on the device for it")
        return None
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    adapter = next(iter(model.peft_config.values()))
    workload = Workload(
        rows=arguments.per_device_train_batch_size,
        tokens=tokens,
        accumulation=arguments.gradient_accumulation_steps,
        rank=getattr(adapter, "r", 0),
        trained_weights=sum(weight.numel() for weight in trained),
        trained_item_bytes=max(weight.element_size() for weight in trained),
        optimizer=str(getattr(arguments.optim, "value", arguments.optim)),
        is_checkpointed=bool(arguments.gradient_checkpointing),
        has_one_length=has_one_length(arguments, rows),
        offloads_activations=bool(getattr(arguments, "activation_offloading", False)),
    )
    return fit(
        PlanJob(
            shapes=shapes_of_model(model),
            config=config,
            workload=workload,
            hardware=Hardware(vram_bytes=budget),
            blocks=blocks,
        )
    )


def refuse_small_card(model: Any, config: PorosConfig) -> None:
    """Refuse a model whose slots alone are over the budget, before a weight is read.

    Rows and adapter are not known by then; what is counted is the least that any training takes.

    Args:
        model: On the meta device, or resident in 4 bits.
        config: How it will be quantised and streamed.

    Raises:
        CapacityError: The details say which values would fit.
    """
    budget = budget_bytes(config, read_device_memory())
    if budget is not None:
        fit(
            PlanJob(
                shapes=shapes_of_model(model),
                config=config,
                workload=Workload(tokens=1, rank=0, trained_weights=0),
                hardware=Hardware(vram_bytes=budget),
            )
        )


def budget_bytes(config: PorosConfig, memory: DeviceMemory | None) -> int | None:
    """Return what training may reserve on the device: auto leaves a margin for the desktop.

    A size in the config is taken as it is, down to what the card has free.
    """
    asked = config.vram_budget_bytes
    if memory is None:
        return asked
    if asked is None:
        free = memory.free_bytes + memory.reserved_bytes
        return min(free - margin_bytes(memory.total_bytes), memory.limit_bytes)
    if asked > memory.available_bytes:
        logger.warning(
            "vram_budget is %s, but %s can be had on this card now; planning for that",
            format_bytes(asked),
            format_bytes(memory.available_bytes),
        )
    return min(asked, memory.available_bytes)


def has_one_length(arguments: Any, rows: Any) -> bool:
    """Tell whether all rows are known to be of one length, behind truncation and packing."""
    if getattr(arguments, "packing", False):
        return True
    table = getattr(rows, "data", None)
    if table is None or "input_ids" not in rows.column_names:
        return False
    import pyarrow.compute as pc  # comes with datasets

    ends = pc.min_max(pc.list_value_length(table.column("input_ids"))).as_py()
    limit = getattr(arguments, "max_length", None) or ends["max"]
    return bool(min(ends["min"], limit) == min(ends["max"], limit))


def longest_row(arguments: Any, rows: Any) -> int | None:
    """Return the tokens of the longest row, or None where it is not known.

    Other trainers than SFTTrainer put several sequences of a row through the model.
    """
    names = {kind.__name__ for kind in type(arguments).__mro__}
    if "SFTConfig" not in names and type(arguments).__name__ != "TrainingArguments":
        return None
    limit: int | None = getattr(arguments, "max_length", None)
    columns = getattr(rows, "column_names", None) or ()
    table = getattr(rows, "data", None)  # rows that come as a stream have none
    if getattr(arguments, "packing", False) or "input_ids" not in columns or table is None:
        return limit
    import pyarrow.compute as pc  # comes with datasets

    longest = int(pc.max(pc.list_value_length(table.column("input_ids"))).as_py())
    return min(longest, limit or longest)


def plan_run(job: Any, model_config: Any, tokens: int | None, hardware: Hardware) -> Plan:
    """Make the plan of a run that is described by its settings alone.

    Args:
        job: See `poros_hf.hf.arguments.Job`.
        model_config: Of the model, as AutoConfig gives it.
        tokens: Of the longest row; None takes `max_length`.
        hardware: Its memory is the budget; None in it makes the cheapest plan.

    Raises:
        CapacityError: The budget is too small; the details say which values would fit.
    """
    workload = workload_of(job.training, job.lora)
    if tokens is not None:
        workload = replace(workload, tokens=min(tokens, workload.tokens))
    return fit(
        PlanJob(
            shapes=shapes_from_config(model_config, job.streaming, job.own.model),
            config=job.streaming,
            workload=workload,
            hardware=hardware,
        )
    )

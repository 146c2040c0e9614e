"""PorosStreaming: the callback that looks after a streamed model under a Trainer."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from poros_hf.config import CONFIG_FILE, PorosConfig, require_config
from poros_hf.environment import private_pool_bytes, read_device_memory
from poros_hf.errors import ConfigError, UnsupportedModelError
from poros_hf.fitting import Plan, without_excess
from poros_hf.hf.adapter_file import check_saved_adapter
from poros_hf.hf.callback_order import LogFigures, insert_before_trackers
from poros_hf.hf.guards import AdapterGuard, LossGuard, check_logged_loss
from poros_hf.hf.planning import final_plan
from poros_hf.hf.refusals import refuse_adapters, refuse_arguments, refuse_micro_batches
from poros_hf.hf.session import QUANTISED_HERE, StreamSession, find_session
from poros_hf.hf.towers import refuse_tower_adapters
from poros_hf.planner import plan_stream
from poros_hf.runtime_base import TransferTimes
from poros_hf.units import GB, format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamReport:
    """What one `train()` moved, and through which memory.

    Attributes:
        store_bytes: Host store, page-locked on a GPU machine.
        slot_bytes: Device memory of all slots.
        moved_bytes: Host to device, evaluation included: blocks, rows of the embedding, the head.
        steps: Optimizer steps.
        moved_bytes_per_step: Of the steps alone, evaluation left out; 0 before the first step.
        overlap_percent: Share of the copy time that was hidden behind compute.
    """

    store_bytes: int
    slot_bytes: int
    num_blocks: int
    num_slots: int
    num_resident_blocks: int
    moved_bytes: int
    steps: int
    moved_bytes_per_step: int
    overlap_percent: float


class PorosStreaming(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Looks after a streamed model: final plan, guards, transfer figures in the logs.

    Pass one to `SFTTrainer(..., callbacks=[PorosStreaming()])`, or to any Trainer. The figures
    are `poros/moved_gb` (1e9 bytes since the last log), `poros/h2d_gbps` (1e9 bytes per second
    while copying), `poros/stall_ms` (compute waiting for copies) and `poros/overlap_percent`
    (share of the copy time that was hidden).

    Args:
        config: Replaces the policy of the config that the model was loaded with (num_slots,
            resident_blocks); what decides the stored bytes must agree. None keeps that config.
        debug: Overwrite each slot with 0xFF before a copy into it, so that a stale read shows.
    """

    def __init__(self, config: PorosConfig | None = None, *, debug: bool = False) -> None:
        require_config(config)
        self._config = config
        self._debug = debug
        self._figures = LogFigures(self._transfer_figures)
        self._session: StreamSession | None = None
        self._loss: LossGuard | None = None
        self._adapters: AdapterGuard | None = None
        self._step = 0
        self._first_step = 0
        self._times = TransferTimes()
        self._moved_at_start = 0
        self._moved_at_log = 0
        self._moved_at_step_begin = 0
        self._moved_in_steps = 0
        self._is_stepping = False
        self._plan: Plan | None = None
        self._peak_before = 0
        self._batches: Any = None
        self._filtered: Any = None

    @property
    def plan(self) -> Plan | None:
        """The plan that training began with; None where there was no budget to plan for."""
        return self._plan

    @property
    def report(self) -> StreamReport:
        """What has been moved since training began."""
        streamer = self._require_session().streamer
        steps = self._step - self._first_step
        plan = streamer.plan
        return StreamReport(
            store_bytes=streamer.store.num_bytes,
            slot_bytes=streamer.slot_bytes,
            num_blocks=plan.num_blocks,
            num_slots=plan.num_slots,
            num_resident_blocks=len(plan.resident),
            moved_bytes=streamer.moved_bytes - self._moved_at_start,
            steps=steps,
            moved_bytes_per_step=self._moved_in_steps // steps if steps else 0,
            overlap_percent=round(self._times.overlap_percent, 1),
        )

    def on_init_end(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any
    ) -> None:
        """Check model and arguments, and keep DDP away from the placeholders.

        A model that is resident in 4 bits is moved to the host store.
        """
        self._attach(args, state, model)

    def _attach(self, args: Any, state: Any, model: Any) -> None:
        insert_before_trackers(self._figures)
        session = find_session(model)
        refuse_arguments(args)
        refuse_adapters(model)
        refuse_tower_adapters(model)
        if session is None:
            from poros_hf.hf.convert import stream_resident

            session = stream_resident(model, self._config or PorosConfig())
        _check_same_store(session, self._config)
        session.adopt(state, self._stop_watching)
        self._session = session
        _hide_from_ddp(model)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Make the final plan, start the guards and say in one line what will be streamed.

        Trainers make the model anew for `model_init`, and callbacks can be added late: whichever
        model is trained is the one that is looked after.
        """
        self._stop_watching()
        if self._session is None or find_session(model) is not self._session:
            self._attach(args, state, model)
        session = self._require_session()
        streamer = session.streamer
        if streamer.recover():
            logger.warning("an interrupted pass had left blocks in use; they are free again")
        if self._debug:
            streamer.enable_poison()
        config, blocks = self._config_in_use(), streamer.plan.block_bytes
        refuse_micro_batches(config, args)
        session.set_micro_batch_size(config.micro_batch_size)
        rows = getattr(train_dataloader, "dataset", None)
        self._plan = final_plan(model, config, blocks, args, rows)
        streamer.situation.plan = self._plan
        memory = read_device_memory()
        self._peak_before = 0 if memory is None else memory.peak_allocated_bytes
        streamer.replan(self._plan.stream if self._plan else plan_stream(blocks, config))
        streamer.take_times()
        self._times = TransferTimes()
        self._step = self._first_step = state.global_step
        self._moved_at_start = self._moved_at_log = streamer.moved_bytes
        self._moved_in_steps = 0
        self._is_stepping = False
        self._loss = LossGuard(streamer.runtime, lambda: self._step + 1)
        self._loss.watch(model)
        self._adapters = AdapterGuard(model)
        self._watch_batches(model)
        _log_plan(session)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where the step's transfers start, and keep Trainer from waiting for the device.

        Trainer would ask after each backward whether the loss is a number, for the average that it
        logs, and queue nothing more until backward has run. The guard of the loss asks as well,
        without that, and stops the run.
        """
        if args.logging_nan_inf_filter:
            self._filtered, args.logging_nan_inf_filter = args, False
        streamer = self._require_session().streamer
        streamer.situation.step = state.global_step + 1
        self._moved_at_step_begin = streamer.moved_bytes
        self._is_stepping = True

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Stop before a bad gradient is used."""
        if self._loss is None or self._adapters is None:
            return
        self._loss.check(wait=True)  # for the forward; backward is queued and goes on
        self._require_session().streamer.situation.is_optimizing = True
        rate = max(float(group["lr"]) for group in optimizer.param_groups)
        self._adapters.before_step(self._loss, rate, may_skip=bool(args.fp16))

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """See whether the step moved the adapters."""
        self._require_session().streamer.situation.is_optimizing = False
        if self._adapters is not None:
            skipped = bool(getattr(optimizer, "step_was_skipped", False))
            self._adapters.after_step(was_skipped=skipped)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step and what it moved; after the second one, correct the plan if need be.

        The first one makes records and the optimizer's state, and is like no other.
        """
        self._restore_filter()
        if state.global_step == self._first_step + 1:
            self._require_session().streamer.runtime.trim()
        if state.global_step == self._first_step + 2:
            self._correct_plan()
        self._step = state.global_step
        if self._is_stepping:
            moved = self._require_session().streamer.moved_bytes - self._moved_at_step_begin
            self._moved_in_steps += moved
            self._is_stepping = False

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at a loss that some trainers hide until now; LogFigures adds the figures."""
        if logs is not None:
            check_logged_loss(logs, state.global_step)

    def on_save(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any
    ) -> None:
        """Compare the saved adapter with what is trained, and write the PorosConfig beside it.

        The config comes last: where it is, the checkpoint was written to the end.
        """
        if args.should_save:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            check_saved_adapter(folder, model)
            self._write_config(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the last losses, stop watching, and leave the PorosConfig in the output folder.

        That is where `save_model()` puts the adapter, which comes without an event.
        """
        if self._loss is not None:
            self._loss.check(wait=True)
        self._stop_watching()
        self._take_times()
        if args.should_save:
            try:
                self._write_config(Path(args.output_dir))
            except OSError as error:
                logger.warning("%s was not written: %s", CONFIG_FILE, error)

    def _correct_plan(self) -> None:
        """Give up resident blocks if a step took more memory than was foreseen."""
        memory = read_device_memory()
        if self._plan is None or memory is None:
            return
        budget = self._plan.job.hardware.vram_bytes
        if budget is not None and memory.reserved_bytes <= budget:
            return  # what was cached went behind the first step, and the second one has fitted
        if memory.peak_allocated_bytes <= self._peak_before:
            return  # the most was taken before training: it says nothing of a step
        # Tiles of the head are allocated, and lie in a pool: they count once.
        tiles = 2 * self._require_session().streamer.tile_bytes
        pools = private_pool_bytes()
        peak = memory.peak_allocated_bytes + pools - min(tiles, pools)
        stream = without_excess(self._plan, peak)
        if stream is None:
            return
        logger.warning(
            "a step took %s of device memory, %s were foreseen: resident blocks go from %d to %d",
            format_bytes(peak),
            format_bytes(self._plan.device.total),
            len(self._plan.stream.resident),
            len(stream.resident),
        )
        streamer = self._require_session().streamer
        streamer.replan(stream)
        streamer.runtime.trim()  # what the blocks lay in

    def _write_config(self, folder: Path) -> None:
        """Write the config that rebuilds this base; none describes FP4, which others have made."""
        if self._require_session().is_nf4:
            self._config_in_use().save_pretrained(folder)

    def _restore_filter(self) -> None:
        """Give the arguments back as they were: evaluation looks at them too."""
        if self._filtered is not None:
            self._filtered.logging_nan_inf_filter, self._filtered = True, None

    def _stop_watching(self) -> None:
        self._restore_filter()
        if self._loss is not None:
            self._loss.unwatch()
        if self._batches is not None:
            self._batches.remove()
            self._batches = None
        if self._session is not None:
            self._session.streamer.situation.end()

    def _watch_batches(self, model: nn.Module) -> None:
        """Note the size of every batch, for the text of an error."""
        situation = self._require_session().streamer.situation

        def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            situation.batch = None if ids is None else tuple(ids.shape[:2])

        self._batches = model.register_forward_pre_hook(note, with_kwargs=True)

    def _config_in_use(self) -> PorosConfig:
        """Return the policy of the callback's config with the quantisation that the base has."""
        loaded = self._require_session().config
        if self._config is None:
            return loaded
        kept = {name: getattr(loaded, name) for name in QUANTISED_HERE}
        return dataclasses.replace(self._config, **kept)

    def _take_times(self) -> TransferTimes:
        """Return the times since the last call, and add them to those of the run."""
        times = self._require_session().streamer.take_times()
        self._times = TransferTimes(
            copy_ms=self._times.copy_ms + times.copy_ms,
            stall_ms=self._times.stall_ms + times.stall_ms,
        )
        return times

    def _transfer_figures(self, logs: dict[str, Any]) -> dict[str, float]:
        streamer = self._require_session().streamer
        times = self._take_times()
        moved = streamer.moved_bytes - self._moved_at_log
        self._moved_at_log = streamer.moved_bytes
        rate = moved / (times.copy_ms * 1e6) if times.copy_ms else 0.0
        return {
            "poros/moved_gb": round(moved / GB, 6),
            "poros/h2d_gbps": round(rate, 3),
            "poros/stall_ms": round(times.stall_ms, 3),
            "poros/overlap_percent": round(times.overlap_percent, 1),
        }

    def _require_session(self) -> StreamSession:
        if self._session is None:
            raise UnsupportedModelError(
                "not-streamed",
                "PorosStreaming is not attached to a trainer yet",
                remedies=["pass it to a trainer first: callbacks=[PorosStreaming()]"],
            )
        return self._session


def _check_same_store(session: StreamSession, given: PorosConfig | None) -> None:
    if given is None:
        return
    loaded = session.config
    differing = [
        f"{name}: loaded with {getattr(loaded, name)!r}, callback says {getattr(given, name)!r}"
        for name in session.store_fields
        if getattr(loaded, name) != getattr(given, name)
    ]
    if differing:
        raise ConfigError(
            "store-mismatch",
            f"the model and PorosStreaming disagree about the stored bytes: {'; '.join(differing)}",
            remedies=["give both the same PorosConfig", "give PorosStreaming none"],
        )


def _hide_from_ddp(model: nn.Module) -> None:
    """Put the placeholders on DDP's ignore list, under the names that the wrapped model uses.

    DDP would broadcast every parameter when it wraps the model, the ones without memory too.
    """
    from poros_hf.head import HostWeight
    from poros_hf.nf4 import HostParams4bit

    ours = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if isinstance(parameter, HostParams4bit | HostWeight)
    ]
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    model._ddp_params_and_buffers_to_ignore = [*before, *ours]  # type: ignore[assignment]


def _log_plan(session: StreamSession) -> None:
    streamer = session.streamer
    plan = streamer.plan
    if plan.moved_bytes_per_step == 0:
        logger.warning(
            "all %d blocks stay on the device (%s): nothing is streamed. Lower vram_budget, "
            "block_size, num_slots or resident_blocks to save device memory.",
            plan.num_blocks,
            format_bytes(streamer.slot_bytes),
        )
    logger.info(
        "streaming %d blocks through %d slots, %d resident: host store %s (%s), slots %s, "
        "%s host to device per step, and %s for each reading of the head",
        len(plan.streamed),
        plan.num_slots,
        len(plan.resident),
        format_bytes(streamer.store.num_bytes),
        "page-locked" if streamer.store.is_pinned else "pageable",
        format_bytes(streamer.slot_bytes),
        format_bytes(plan.moved_bytes_per_step),
        format_bytes(streamer.head_bytes),
    )

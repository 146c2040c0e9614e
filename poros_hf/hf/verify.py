"""The parity check on the machine and the model of whoever asks: streamed against stock."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from poros_hf.config import PorosConfig
from poros_hf.environment import child_environment, read_device_memory, read_host_memory
from poros_hf.errors import CapacityError, ConfigError, VerifyError
from poros_hf.hf import verify_side
from poros_hf.hf.decoder import auto_class
from poros_hf.hf.loader import read_config
from poros_hf.hf.planning import plan, workload_of
from poros_hf.planner import block_size

# Beyond this share of what is free, a resident model is not tried.
_USABLE_SHARE = 0.9
# On the CPU, what bitsandbytes dequantises and the checkpoint's pages want room as well.
_USABLE_SHARE_OF_RAM = 0.5
_AUTO_NUM_SLOTS = 2
_TRAINING_FIELDS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "max_length",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "loss_type",
    "bf16",
    "fp16",
    "use_cpu",
    "seed",
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Check:
    """What is to be compared.

    Attributes:
        location: revision and trust_remote_code, as from_pretrained takes them.
        training: The SFTConfig whose arithmetic is taken.
        rows: Rows of tokens, with or without labels, as many as the steps take.
        num_layers: Decoder layers of both sides; None takes as many as fit.
    """

    model: str
    location: dict[str, Any]
    streaming: PorosConfig
    training: Any
    lora: Any
    rows: list[dict[str, Any]]
    num_steps: int
    num_layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first tensor that differs, and by how much.

    Attributes:
        step: Optimizer step, from 1; 0 for the adapter in the end.
    """

    step: int
    name: str
    max_abs_diff: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the comparison has found.

    Attributes:
        num_layers: Compared, of `num_layers_whole`.
        num_tensors: LoRA gradients of one step.
        num_unequal: Gradients and adapter tensors that differ in any bit, over all steps.
        max_abs_diff: Largest difference of any element of any of them.
        first: The first that differs, or None.
        is_self_equal: Whether the stock side equals itself, which is asked only where something
            differs; None where it was not asked.
    """

    num_layers: int
    num_layers_whole: int
    num_steps: int
    num_tensors: int
    num_unequal: int
    max_abs_diff: float
    first: Difference | None
    losses_equal: bool
    is_self_equal: bool | None
    num_blocks: int
    num_slots: int
    moved_bytes: int
    nondeterministic: list[str]

    @property
    def is_equal(self) -> bool:
        """Whether every gradient, the adapter and the losses are equal in every bit."""
        return self.num_unequal == 0 and self.losses_equal


def verify(check: Check, say: Callable[[str], None]) -> Verdict:
    """Train both sides, each in a process of its own, and compare them tensor by tensor.

    Args:
        check: What is to be compared.
        say: Told what is going on.

    Raises:
        CapacityError: Not even the least number of layers fits beside itself.
        VerifyError: A side failed, or had gradients of zero, which would be equal whatever happens.
    """
    model_config = read_config(check.model, check.streaming, **check.location)
    whole = model_config.get_text_config(decoder=True).num_hidden_layers
    streaming, num_layers = _fit(check, model_config, whole)
    say(f"comparing {num_layers} of {whole} layers over {check.num_steps} steps")
    with tempfile.TemporaryDirectory(prefix="poros-verify-") as name:
        folder = Path(name)
        if num_layers < whole:
            check = replace(check, model=str(_truncate(check, num_layers, folder / "model")))
        job = _write_job(check, streaming, model_config, folder)
        resident = _run("resident", job, folder / "resident", say)
        streamed = _run("streamed", job, folder / "streamed", say)
        if resident["imports_poros_hf"]:
            raise VerifyError("verify-side", "the resident side imported poros_hf", side="resident")
        compared = _compare(folder / "resident", folder / "streamed", check.num_steps)
        losses_equal = resident["losses"] == streamed["losses"]
        is_self_equal = None
        if compared.first is not None or not losses_equal:
            again = _run("resident", job, folder / "again", say)
            other = _compare(folder / "resident", folder / "again", check.num_steps)
            is_self_equal = other.first is None and again["losses"] == resident["losses"]
    return Verdict(
        num_layers=num_layers,
        num_layers_whole=whole,
        num_steps=check.num_steps,
        num_tensors=compared.num_tensors,
        num_unequal=compared.num_unequal,
        max_abs_diff=compared.max_abs_diff,
        first=compared.first,
        losses_equal=losses_equal,
        is_self_equal=is_self_equal,
        num_blocks=streamed["num_blocks"],
        num_slots=streamed["num_slots"],
        moved_bytes=streamed["moved_bytes"],
        nondeterministic=resident["nondeterministic"],
    )


def random_rows(model: str, location: dict[str, Any], num_rows: int, num_tokens: int) -> list[Any]:
    """Return rows of random tokens: half of them full, the others shorter, so that some is padded.

    Args:
        model: Folder or repository, for its vocabulary.
        location: See `Check`.
        num_rows: How many.
        num_tokens: Of a full row.
    """
    vocabulary = len(AutoTokenizer.from_pretrained(model, **location))
    generator = torch.Generator().manual_seed(0)
    lengths = [num_tokens if index % 2 == 0 else num_tokens * 3 // 4 for index in range(num_rows)]
    return [
        {"input_ids": torch.randint(0, vocabulary, (length,), generator=generator).tolist()}
        for length in lengths
    ]


def _fit(check: Check, model_config: Any, whole: int) -> tuple[PorosConfig, int]:
    """Return how the streamed side streams, and how many layers both sides have.

    Streaming is made to happen: nothing is resident, and there are more blocks than slots.
    """
    slots = _AUTO_NUM_SLOTS if check.streaming.num_slots == "auto" else check.streaming.num_slots
    size = block_size(check.streaming)
    fitting = _layers_that_fit(check, model_config, whole)
    num_layers = check.num_layers or min(whole, fitting)
    if math.ceil(num_layers / size) <= slots:
        size = 1
    if num_layers <= slots or num_layers > whole:
        _refuse_layers(check.num_layers, slots + 1, whole, fitting)
    streaming = replace(
        check.streaming, block_size=size, num_slots=slots, resident_blocks=0, vram_budget="auto"
    )
    return streaming, num_layers


def _layers_that_fit(check: Check, model_config: Any, whole: int) -> int:
    cheapest = plan(
        model_config,
        replace(check.streaming, vram_budget="auto", resident_blocks=0),
        workload=workload_of(check.training, check.lora),
    )
    store = sum(cheapest.stream.block_bytes)
    fixed = cheapest.device.total - sum(cheapest.stream.slot_bytes) + cheapest.margin_bytes
    memory = read_device_memory()
    if memory is not None:
        available = int(_USABLE_SHARE * memory.available_bytes)
    else:
        available = int(_USABLE_SHARE_OF_RAM * read_host_memory().available_bytes)
    return max(0, (available - fixed) * whole // store)


def _refuse_layers(asked: int | None, least: int, whole: int, fitting: int) -> None:
    if asked is not None:
        raise ConfigError(
            "config-value",
            f"layers={asked} must be a whole number from {least} (more than there are slots) to "
            f"{whole}",
            field="layers",
            value=asked,
        )
    raise CapacityError(
        "verify-memory",
        f"{least} layers are the least that is streamed, and {min(fitting, whole)} fit beside "
        "embedding, head and optimizer where the stock side needs them resident",
        remedies=["lower max_length or the batch size", "end what else uses the card"],
        needed_layers=least,
        fitting_layers=min(fitting, whole),
    )


def _truncate(check: Check, num_layers: int, folder: Path) -> Path:
    """Make a folder that is the model with its first layers alone; weights are links."""
    source = Path(check.model)
    if not source.is_dir():
        source = Path(snapshot_download(check.model, revision=check.location["revision"]))
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    (folder / "config.json").unlink()
    config = AutoConfig.from_pretrained(source, **check.location)
    text = config.get_text_config(decoder=True)
    whole = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == whole:
            setattr(text, name, value[:num_layers])  # the kind of each layer
    text.num_hidden_layers = num_layers
    config.save_pretrained(folder)
    return folder


def _write_job(check: Check, streaming: PorosConfig, model_config: Any, folder: Path) -> Path:
    """Write all that a side is told; both read the same file."""
    check.lora.save_pretrained(str(folder / "lora"))
    training = {name: getattr(check.training, name) for name in _TRAINING_FIELDS}
    # What the device has free decides none of these, and none of them changes the arithmetic.
    training |= {
        "max_steps": check.num_steps,
        "optim": str(getattr(check.training.optim, "value", check.training.optim)),
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    job = {
        "model": check.model,
        "location": check.location,
        "streaming": streaming.to_dict(),
        "double_quant": streaming.double_quant,
        "compute_dtype": streaming.compute_dtype,
        "auto_class": auto_class(model_config).__name__,
        "lora": str(folder / "lora"),
        "training": training,
        "rows": check.rows,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def _run(side: str, job: Path, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run one side to its end and return what it says."""
    say(f"training {side}")
    folder.mkdir()
    log = folder / "log"
    program = str(Path(verify_side.__file__))
    # Without -P the folder of the program would be searched for modules, and it has some.
    words = [sys.executable, "-P", program, folder.name.replace("again", side), str(job)]
    environment = child_environment(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    with log.open("wb") as output:
        process = subprocess.run(
            [*words, str(folder)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if process.returncode != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise VerifyError(
            "verify-side",
            f"the {side} side ended with status {process.returncode}: "
            f"{lines[-1] if lines else 'it said nothing'}\n" + "\n".join(lines[-15:-1]),
            remedies=["lower --layers, if memory ran out", "report it with the lines above"],
            side=side,
        )
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@dataclass(frozen=True, kw_only=True)
class _Compared:
    num_tensors: int
    num_unequal: int
    max_abs_diff: float
    first: Difference | None


def _compare(first: Path, second: Path, num_steps: int) -> _Compared:
    files = [(step, f"step-{step}.safetensors") for step in range(1, num_steps + 1)]
    num_tensors = 0
    found: list[Difference] = []
    for step, name in [*files, (0, "adapter.safetensors")]:
        with safe_open(first / name, "pt") as left, safe_open(second / name, "pt") as right:
            names = sorted(left.keys(), key=_natural)
            if set(names) != set(right.keys()) or not names:
                raise VerifyError(
                    "verify-side", f"the sides have other tensors in {name}", side="streamed"
                )
            num_tensors = len(names) if step else num_tensors
            for tensor in names:
                found += _differences(step, tensor, left, right)
    return _Compared(
        num_tensors=num_tensors,
        num_unequal=len(found),
        max_abs_diff=max((item.max_abs_diff for item in found), default=0.0),
        first=found[0] if found else None,
    )


def _differences(step: int, name: str, left: Any, right: Any) -> Iterator[Difference]:
    """Yield the difference of one tensor, if there is one; a gradient of zeros is refused."""
    a, b = left.get_tensor(name), right.get_tensor(name)
    if step and not a.any():
        raise VerifyError(
            "verify-vacuous",
            f"the gradient of {name} is zero at step {step}: equal zeros would prove nothing",
            remedies=["use rows with more tokens to learn from"],
            name=name,
            step=step,
        )
    bits = _INTEGERS[a.element_size()]
    if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.view(bits), b.view(bits)):
        largest = (a.double() - b.double()).abs().max().item() if a.shape == b.shape else math.inf
        yield Difference(step=step, name=name, max_abs_diff=largest)


def _natural(name: str) -> list[tuple[int, str]]:
    """Order layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

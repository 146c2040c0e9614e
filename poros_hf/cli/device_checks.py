"""Checks of the device: card, link, 4-bit arithmetic, and a streamed training step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from poros_hf.cli.findings import Finding
from poros_hf.environment import (
    other_gpu_processes,
    query_smi,
    read_device_memory,
    read_gpu,
)
from poros_hf.units import GIB, format_bytes

# 1e9 bytes per second and lane, by PCIe generation.
_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_LEAST_LINK_SHARE = 0.65
_SIZE = 256
_RELATIVE_ERROR = 0.02


def device_checks() -> dict[str, Callable[[], Finding]]:
    """Return the checks by name, in the order in which they are told."""
    return {
        "GPU": check_gpu,
        "driver": check_driver,
        "link": check_link,
        "other programs": check_others,
        "4-bit arithmetic": check_four_bit,
        "streaming": check_streaming,
    }


def check_gpu() -> Finding:
    """Name the card, and what it cannot do."""
    gpu = read_gpu()
    if gpu is None:
        is_hidden = bool(query_smi("gpu", ("name",)))
        advice = "plan for another machine with `poros plan --vram`, or try things out on the CPU"
        if is_hidden:
            advice = "torch sees no CUDA: install a build of torch with it, or unhide the card"
        return Finding(
            name="GPU",
            status="problem" if is_hidden else "warning",
            text="nvidia-smi sees a card and torch does not" if is_hidden else "none",
            advice=advice,
        )
    memory = read_device_memory()
    free = 0 if memory is None else memory.free_bytes
    text = (
        f"{gpu.name}, {format_bytes(free)} of {format_bytes(gpu.total_bytes)} free, compute "
        f"capability {gpu.compute_capability}, CUDA {gpu.cuda_version}"
    )
    numbers = {**asdict(gpu), "free_bytes": free}
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return Finding(name="GPU", status="OK", text=f"{text}, bfloat16", numbers=numbers)
    return Finding(
        name="GPU",
        status="warning",
        text=f"{text}, no bfloat16",
        advice="set compute_dtype: float16 and fp16: true",
        numbers=numbers,
    )


def check_driver() -> Finding:
    """Name the driver, as far as nvidia-smi is there."""
    lines = query_smi("gpu", ("driver_version",))
    if lines:
        return Finding(name="driver", status="OK", text=lines[0][0])
    text = "not known: there is no nvidia-smi"
    if not torch.cuda.is_available():
        return Finding(name="driver", status="OK", text=text)
    return Finding(name="driver", status="OK", text=f"{text}, and CUDA works")


def check_link() -> Finding:
    """Measure copies to the card, and compare them with what its slot could carry."""
    from poros_hf.probe import measure_rates

    if not torch.cuda.is_available():
        return Finding(name="link", status="OK", text="there is no card to copy to")
    rates = measure_rates(_runtime())
    text = (
        f"{rates.link_gbps:.1f} GB/s to the card (1e9 bytes), {rates.pageable_gbps:.1f} from "
        f"memory that is not page-locked; {rates.matmul_tflops:.0f} TFLOP/s in bfloat16, "
        f"{rates.memory_gbps:.0f} GB/s device memory"
    )
    # Read right behind the copies: an idle card lets its link fall asleep.
    fields = ("pcie.link.gen.current", "pcie.link.width.current", "pcie.link.width.max")
    lines = query_smi("gpu", fields)
    numbers: dict[str, Any] = asdict(rates)
    if not lines or not all(word.isdigit() for word in lines[0]):
        return Finding(name="link", status="OK", text=text, numbers=numbers)
    generation, width, most_lanes = map(int, lines[0])
    nominal = _LANE_GBPS.get(generation, 0.0) * width
    text = f"PCIe {generation} x{width}, {text}"
    numbers |= {"pcie_generation": generation, "pcie_width": width, "nominal_gbps": nominal}
    if width < most_lanes:
        advice = f"the card can use {most_lanes} lanes: move it to the slot nearest to the CPU"
    elif rates.link_gbps < _LEAST_LINK_SHARE * nominal:
        advice = f"its slot could carry {nominal:.0f} GB/s: close other users, check NUMA and BIOS"
    else:
        return Finding(name="link", status="OK", text=text, numbers=numbers)
    return Finding(name="link", status="warning", text=text, advice=advice, numbers=numbers)


def check_others() -> Finding:
    """Name other programs that hold the card's memory."""
    others = other_gpu_processes()
    used = sum(item.used_bytes for item in others)
    names = ", ".join(f"{item.name} {format_bytes(item.used_bytes)}" for item in others[:5])
    text = names or "none seen on the card"
    numbers = {"used_bytes": used, "num_processes": len(others)}
    if used < GIB:
        return Finding(name="other programs", status="OK", text=text, numbers=numbers)
    return Finding(
        name="other programs",
        status="warning",
        text=text,
        advice="close them: every 0.25 GiB is a resident block of a 32B model",
        numbers=numbers,
    )


def check_four_bit() -> Finding:
    """Multiply with an NF4 weight, forward and backward, and compare with plain arithmetic."""
    if _bitsandbytes() is None:
        return _no_bitsandbytes("4-bit arithmetic")
    error = four_bit_error(_device())
    numbers = {"relative_error": error}
    if error <= _RELATIVE_ERROR:
        text = f"forward and backward agree with plain arithmetic on {_device().type}"
        return Finding(name="4-bit arithmetic", status="OK", text=text, numbers=numbers)
    return Finding(
        name="4-bit arithmetic",
        status="problem",
        text=f"results differ by {100 * error:.1f} % from plain arithmetic on {_device().type}",
        advice="reinstall bitsandbytes for this CUDA version: python -m bitsandbytes",
        numbers=numbers,
    )


def four_bit_error(device: torch.device) -> float:
    """Return the largest relative error of a product with an NF4 weight and of its gradient."""
    bnb = _bitsandbytes()
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(_SIZE, _SIZE, generator=generator).to(device, torch.bfloat16)
    given = torch.randn(8, _SIZE, generator=generator).to(device, torch.bfloat16)
    packed, state = bnb.functional.quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
    weight = bnb.functional.dequantize_4bit(packed, state).to(torch.float32)
    x = given.clone().requires_grad_(True)
    result = bnb.matmul_4bit(x, packed.t(), state)
    result.sum().backward()
    expected = given.float() @ weight.t()
    expected_grad = weight.sum(0).expand(8, -1)
    assert x.grad is not None, "backward has run"
    pairs = ((result.detach().float(), expected), (x.grad.float(), expected_grad))
    return max(float((got - want).abs().max() / want.abs().max()) for got, want in pairs)


def check_streaming() -> Finding:
    """Train a tiny model one step through two slots and resident, and compare all gradients."""
    if _bitsandbytes() is None:
        return _no_bitsandbytes("streaming")
    folder = Path(tempfile.mkdtemp(prefix="poros-doctor-"))
    try:
        difference, moved_bytes = streaming_difference(folder)
    finally:
        shutil.rmtree(folder)
    numbers = {"max_abs_difference": difference, "moved_bytes": moved_bytes}
    place = f"on {_device().type}, {format_bytes(moved_bytes)} moved"
    if difference == 0.0 and moved_bytes > 0:
        text = f"two slots give the gradients of a resident model, bit for bit ({place})"
        return Finding(name="streaming", status="OK", text=text, numbers=numbers)
    return Finding(
        name="streaming",
        status="problem",
        text=f"gradients differ by {difference:.3g} from those of a resident model ({place})",
        advice="run `poros verify` on your model, and report what both say",
        numbers=numbers,
    )


def streaming_difference(folder: Path) -> tuple[float, int]:
    """Return the largest difference of any LoRA gradient, streamed - resident, and bytes moved."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from poros_hf.config import PorosConfig
    from poros_hf.hf.quantizer import bitsandbytes_config
    from poros_hf.hf.session import find_session

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    settings = PorosConfig(num_slots=2, resident_blocks=0)
    found = []
    moved_bytes = 0
    for quantization in (bitsandbytes_config(settings), settings):
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization, dtype="bfloat16", device_map={"": _device()}
        )
        session = find_session(model)
        if session is not None:
            session.trainer_state = object()  # no Trainer, and no warning that there is none
        found.append(_tiny_gradients(model))
        if session is not None:
            moved_bytes = session.streamer.moved_bytes
            session.streamer.close()
    resident, streamed = found
    if resident.keys() != streamed.keys() or not any(
        bool(grad.any()) for grad in found[0].values()
    ):
        return float("inf"), moved_bytes
    return max(float((resident[n] - streamed[n]).abs().max()) for n in resident), moved_bytes


def _tiny_gradients(model: Any) -> dict[str, torch.Tensor]:
    from bitsandbytes.nn import Linear4bit
    from peft import LoraConfig, get_peft_model

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False  # it repacks weights, with rounded scales
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(1)
    model = get_peft_model(model, lora).train()
    ids = torch.arange(24).remainder(100).view(2, 12).to(_device())
    model(input_ids=ids, labels=ids).loss.backward()
    return {
        name: parameter.grad.float().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _runtime() -> Any:
    from poros_hf.runtime import runtime_for

    return runtime_for(_device())


def _bitsandbytes() -> Any:
    """Return the module, or None where it is not installed."""
    try:
        import bitsandbytes
    except ImportError:
        return None
    return bitsandbytes


def _no_bitsandbytes(name: str) -> Finding:
    return Finding(
        name=name,
        status="problem",
        text="not tried: bitsandbytes is not installed, or does not import",
        advice="pip install 'bitsandbytes>=0.50.2'",
    )

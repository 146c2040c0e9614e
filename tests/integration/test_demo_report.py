"""What the recipes compute, without training anything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recipes import demo, make_smollm2, sft_smollm2


def write_adapter(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file(
        {f"layer.{name}.weight": tensor.clone() for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def compare(tmp_path: Path, first: dict[str, Any], second: dict[str, Any]) -> Any:
    return demo.compare_adapters(
        write_adapter(tmp_path / "first", **first), write_adapter(tmp_path / "second", **second)
    )


def run_result(**changes: Any) -> dict[str, Any]:
    return {
        "arguments": {"prompt": "def f():\n"},
        "loss_before": 2.0,
        "loss_after": 1.5,
        "answer_before": "no idea",
        "answer_after": "return 1\nreturn 2\n",
        "imported_poros_hf": True,
        "streaming": {
            "steps": 7,
            "store_bytes": 30_000_000,
            "slot_bytes": 2_000_000,
            "num_blocks": 15,
            "num_slots": 2,
            "moved_bytes_per_step": 56_000_000,
        },
        **changes,
    }


ONES = torch.ones(2, 3)
EQUAL = demo.AdapterComparison(num_tensors=4, num_trained=2, num_lora_b=2, largest_difference=0.0)
RESIDENT = run_result(imported_poros_hf=False)


def test_equal_adapters_compare_as_equal(tmp_path: Path) -> None:
    tensors = {"lora_A": ONES, "lora_B": ONES.bfloat16()}
    result = compare(tmp_path, tensors, tensors)
    assert result.is_equal
    assert result.num_tensors == 2


def test_the_largest_difference_is_found(tmp_path: Path) -> None:
    first = {"lora_A": ONES, "lora_B": ONES}
    result = compare(tmp_path, first, {"lora_A": ONES + 0.25, "lora_B": ONES - 0.5})
    assert result.largest_difference == 0.5
    assert not result.is_equal


@pytest.mark.parametrize(
    "second",
    [
        {"lora_A": ONES, "lora_B": ONES * math.nan},
        {"lora_A": ONES},
        {"lora_A": ONES, "lora_B": ONES[:1]},
    ],
    ids=["nan", "missing", "other shape"],
)
def test_adapters_that_cannot_be_subtracted_are_not_equal(
    tmp_path: Path, second: dict[str, Any]
) -> None:
    assert not compare(tmp_path, {"lora_A": ONES, "lora_B": ONES}, second).is_equal


@pytest.mark.parametrize("lora_b", [{}, {"lora_B": torch.zeros(2)}], ids=["none", "zero"])
def test_adapters_that_were_not_trained_prove_nothing(
    tmp_path: Path, lora_b: dict[str, Any]
) -> None:
    tensors = {"lora_A": ONES, **lora_b}
    assert not compare(tmp_path, tensors, tensors).is_equal


def test_a_good_demo_has_no_failures() -> None:
    assert demo.failures(run_result(), RESIDENT, EQUAL) == []


@pytest.mark.parametrize(
    ("streamed", "resident"),
    [
        (run_result(loss_after=1.9), run_result(loss_after=1.9, imported_poros_hf=False)),
        (run_result(loss_after=1.49), RESIDENT),
        (run_result(imported_poros_hf=False), RESIDENT),
        (run_result(), run_result()),
    ],
    ids=["loss hardly falls", "losses differ", "not streamed", "not stock"],
)
def test_each_broken_promise_fails_the_demo(
    streamed: dict[str, Any], resident: dict[str, Any]
) -> None:
    assert len(demo.failures(streamed, resident, EQUAL)) == 1


def test_unequal_adapters_fail_the_demo() -> None:
    unequal = demo.AdapterComparison(
        num_tensors=4, num_trained=2, num_lora_b=2, largest_difference=1e-6
    )
    assert demo.failures(run_result(), RESIDENT, unequal) == ["the adapters are not equal"]


def test_the_report_shows_what_was_computed() -> None:
    text = demo.report(run_result(), RESIDENT, EQUAL)
    for shown in (
        "2.0000 before, 1.5000 after 7 steps",
        "30.0 MB of packed weights in 15 blocks",
        "2.0 MB in 2 slots",
        "56.0 MB, host to device only",
        "adapter tensor: 0 (4 tensors",
        "return 1\n                 return 2",
    ):
        assert shown in text
    assert "device peak" not in text


def test_the_report_shows_device_peaks_where_there_is_a_device() -> None:
    streamed = run_result(device_peak_bytes=400_000_000)
    resident = run_result(device_peak_bytes=900_000_000)
    text = demo.report(streamed, resident, EQUAL)
    assert "400.0 MB streamed, 900.0 MB resident" in text


def test_checkpoint_names_are_those_of_llama() -> None:
    names = make_smollm2.checkpoint_name
    assert names("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert names("token_embd.weight") == "model.embed_tokens.weight"


def test_rotary_halves_are_split_again() -> None:
    heads, head_dim, width = 3, 4, 2
    weight = torch.arange(heads * head_dim * width).view(heads * head_dim, width)
    interleaved = weight.view(heads, 2, head_dim // 2, width).transpose(1, 2).reshape(-1, width)
    assert not torch.equal(interleaved, weight)
    assert torch.equal(make_smollm2.split_rotary_halves(interleaved, heads), weight)


def test_the_line_break_moves_to_the_completion() -> None:
    row = sft_smollm2.on_token_boundary({"prompt": "def f():\n\n", "completion": "    pass\n"})
    assert row == {"prompt": "def f():", "completion": "\n\n    pass\n"}


def test_every_tenth_row_is_held_out() -> None:
    path = Path(sft_smollm2.__file__).parent / "data" / "humaneval_sft.jsonl"
    train, held_out = sft_smollm2.load_rows(str(path))
    assert (len(train), len(held_out)) == (148, 16)
    assert not set(train["prompt"]) & set(held_out["prompt"])

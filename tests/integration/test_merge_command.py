"""`poros merge`: the values of PEFT's merge of dequantised weights, in files anybody can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from poros_hf import PorosConfig
from poros_hf.cli.main import main
from poros_hf.errors import PorosError, UnsupportedModelError
from poros_hf.hf import merge as merge_module
from poros_hf.hf.merge import merge
from tests.families import TOWERS
from tests.integration.stock import IDS, quantisation
from tests.tiny import MULTIMODAL, auto_class, byte_tokenizer, write_tiny_model


def make_adapter(base: Path, folder: Path, **options: Any) -> Path:
    """Write an adapter with random weights in bfloat16, as TRL saves it."""
    auto = auto_class(AutoConfig.from_pretrained(base))
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    model = get_peft_model(auto.from_pretrained(base, dtype="bfloat16"), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad and "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).bfloat16()
        elif parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16()
    model.save_pretrained(folder)
    PorosConfig(block_size=2).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, adapter: Path) -> Any:
    """Dequantise the stock 4-bit model and merge the adapter with PEFT."""
    auto = auto_class(AutoConfig.from_pretrained(base))
    model = auto.from_pretrained(base, quantization_config=quantisation(), dtype="bfloat16")
    model = model.dequantize(dtype=torch.bfloat16)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def load(folder: Path) -> Any:
    auto = auto_class(AutoConfig.from_pretrained(folder))
    return auto.from_pretrained(folder, dtype="bfloat16").eval()


def names_in(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen2", {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
        ("qwen2-tied", {}),
        ("gpt2", {}),
        ("qwen2", {"modules_to_save": ["lm_head"]}),
        ("gemma3-vision", {"exclude_modules": TOWERS}),
        ("qwen2_5_vl", {"exclude_modules": TOWERS}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_merged_weights_equal_those_of_peft(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base = write_tiny_model(tmp_path / "base", family)
    adapter = make_adapter(base, tmp_path / "adapter", **options)
    result = merge(adapter, tmp_path / "merged", shard_bytes=200_000)
    ours, theirs = load(tmp_path / "merged"), merged_by_peft(base, adapter).eval()
    expected = theirs.state_dict()
    found = ours.state_dict()
    assert found.keys() == expected.keys()
    if family == "gpt2":  # whose layers are of another class in 4 bits
        in_layers = [name for name in expected if ".h." in name and expected[name].dim() == 2]
        expected |= {name: expected[name].T for name in in_layers}
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not differing
    plain = load(base).state_dict()
    assert sum(not torch.equal(found[name], plain[name]) for name in plain) >= result.num_merged > 0
    if family not in (*MULTIMODAL, "gpt2"):
        with torch.no_grad():
            assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


@pytest.mark.parametrize("family", ["llama", "gemma3-vision"])
def test_merged_files_have_the_names_of_the_base(family: str, tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", family)
    options = {"exclude_modules": TOWERS} if family in MULTIMODAL else {}
    adapter = make_adapter(base, tmp_path / "adapter", **options)
    merge(adapter, tmp_path / "merged")
    assert names_in(tmp_path / "merged") == names_in(base)


def test_merged_folder_is_plain_and_split_into_files(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", "llama")
    adapter = make_adapter(base, tmp_path / "adapter")
    result = merge(adapter, tmp_path / "merged", shard_bytes=100_000)
    folder = tmp_path / "merged"
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert len(shards) == result.num_shards > 1
    assert set(index["weight_map"].values()) == set(shards)
    assert set(index["weight_map"]) == names_in(folder)
    sizes = [sum(tensor.nbytes for tensor in load_file(folder / name).values()) for name in shards]
    assert max(sizes) <= 100_000
    assert sum(sizes) == result.num_bytes == index["metadata"]["total_size"]
    assert AutoTokenizer.from_pretrained(folder)("abc")["input_ids"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_merge_takes_a_base_that_is_4_bit_already(
    tmp_path: Path, load_streamed: Callable[..., Any], tiny_model: Path
) -> None:
    load_streamed().save_pretrained(tmp_path / "packed")
    byte_tokenizer().save_pretrained(tmp_path / "packed")
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    merge(adapter, tmp_path / "one")
    merge(adapter, tmp_path / "two", base_model=str(tmp_path / "packed"))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> Path:
    return make_adapter(tiny_model, tmp_path / "adapter")


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(merge_module, "from_pretrained", refuse)


def test_command_says_what_it_wrote(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(adapter), "--out", str(tmp_path / "merged")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"merged 91 weights of {adapter} into ")
    assert "in 1 files" in said.out
    assert "writing file 1" in said.err


@pytest.mark.usefixtures("no_weights")
def test_merge_leaves_a_folder_with_files_alone(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(adapter), "--out", str(adapter)]) == 1
    said = capsys.readouterr().err
    assert "[output-not-empty]" in said
    assert "--out" in said
    assert "--resume" not in said
    assert (adapter / "adapter_model.safetensors").is_file()


@pytest.mark.usefixtures("no_weights")
def test_merge_refuses_a_disk_that_is_too_small(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(PorosError) as caught:
        merge(adapter, tmp_path / "merged")
    assert caught.value.slug == "disk-space"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("change", "wish"),
    [
        ({"peft_type": "LOHA"}, "peft_type LOHA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias='all'"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_merge_refuses_adapters_that_are_more_than_a_sum(
    change: dict[str, Any], wish: str, adapter: Path, tmp_path: Path
) -> None:
    path = adapter / "adapter_config.json"
    values = json.loads(path.read_text())
    if "peft_type" in change:
        kept = ("base_model_name_or_path", "target_modules", "r")
        values = {name: values[name] for name in kept}
    path.write_text(json.dumps({**values, **change}))
    with pytest.raises(UnsupportedModelError) as caught:
        merge(adapter, tmp_path / "merged")
    assert (caught.value.slug, caught.value.details["wishes"]) == ("merge-kind", [wish])


def test_merge_leaves_nothing_behind_when_it_is_interrupted(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(merge_module, "_write_config", interrupt)
    with pytest.raises(KeyboardInterrupt):
        merge(adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


def test_merge_refuses_names_that_nobody_could_load(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {f"other.{name}": tensor for name, tensor in tensors.items()}

    monkeypatch.setattr(merge_module, "revert_weight_conversion", rename)
    with pytest.raises(UnsupportedModelError) as caught:
        merge(adapter, tmp_path / "merged")
    assert caught.value.slug == "merge-names"
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("change", [{"hidden_size": 96}, {"family": "gpt2"}], ids=["size", "names"])
def test_merge_refuses_another_base_and_leaves_nothing(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(
        write_tiny_model(tmp_path / "base", "llama"),
        tmp_path / "adapter",
        target_modules=["q_proj"],
    )
    other = write_tiny_model(tmp_path / "other", **{"family": "llama", **change})
    words = ["merge", str(adapter), "--out", str(tmp_path / "out"), "--base", str(other)]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert f"[adapter-other-base] the adapter {adapter} does not fit {other}" in said
    assert str(tmp_path / "base") in said
    assert not (tmp_path / "out").exists()

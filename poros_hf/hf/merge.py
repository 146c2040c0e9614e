"""Merge an adapter into its base: a 16-bit checkpoint that needs neither PEFT nor this package.

[Note: what is merged]
The adapter was trained beside the NF4 weights, errors of quantisation included, so it is added to
those and not to the 16-bit weights that they came from: `dequantise(packed) + B A * scale`, in
float32 and rounded once. PEFT's own merge of a 4-bit layer quantises the sum again, and loses most
of a small update.

The base lies packed in the host store as in training. One decoder layer is 16-bit at a time, and
one shard waits to be written, so that RAM is bounded whatever the model.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from poros_hf.errors import ConfigError, UnsupportedModelError, name_offenders
from poros_hf.hf.adapter_repo import AdapterRepository
from poros_hf.hf.adapter_shape import meta_model
from poros_hf.hf.decoder import find_decoder_layers
from poros_hf.hf.loader import from_pretrained, read_config
from poros_hf.hf.output_folder import check_disk, claimed
from poros_hf.hub import Repository
from poros_hf.linear import StreamedLinear4bit

SHARD_BYTES = 2 * 10**9
_ADAPTER = "default"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Parts of a PEFT module that are no weight of the base.
_LORA_PARTS = "lora_"
# What bitsandbytes stores beside a packed weight.
_QUANT_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeResult:
    """What was written.

    Attributes:
        folder: Holds config.json, the shards, and the tokenizer where there is one.
        num_merged: Weights that the adapter changed.
    """

    folder: Path
    base_model: str
    num_tensors: int
    num_merged: int
    num_shards: int
    num_bytes: int


def merge(
    adapter: str | Path,
    folder: Path,
    *,
    base_model: str | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = lambda text: None,
    shard_bytes: int = SHARD_BYTES,
) -> MergeResult:
    """Write base and adapter as one checkpoint in the config's compute_dtype.

    Everything is written beside the folder and moved in at the end, config.json last, so that what
    is there in part does not look like a model.

    Args:
        adapter: Folder, or repository on the Hub.
        folder: Has to be empty, and is made if need be.
        base_model: Where the base is, if not where the adapter says.
        trust_remote_code: Whether code from the base's repository may run.
        say: Told what is going on.
        shard_bytes: Of one file.

    Raises:
        ConfigError: The folder is not empty.
        CapacityError: The disk is too small.
        UnsupportedModelError: The adapter is of a kind that cannot be merged weight by weight, or
            the base's own names cannot be restored.
        PorosError: The adapter or its base cannot be loaded; see docs/errors.md.
    """
    source = Repository(name=str(adapter))
    repository = AdapterRepository(source, base_model)
    _refuse_kind(source.name, repository.peft_config)
    base = repository.base_model
    config = repository.stored_config()
    with claimed(folder, may_hold_files=False, remedies=["name an empty or new folder with --out"]):
        location: dict[str, Any] = {"revision": repository.base_revision}
        location["trust_remote_code"] = trust_remote_code
        model_config = read_config(base, config, **location)
        item_bytes = getattr(torch, config.compute_dtype).itemsize
        weights = meta_model(model_config).parameters()
        check_disk(folder, item_bytes * sum(weight.numel() for weight in weights))
        say(f"reading {base}")
        model = from_pretrained(
            adapter, config, base_model=base_model, trust_remote_code=trust_remote_code
        )
        known = _stored_names(Repository(name=base, revision=location["revision"]))
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
            beside = Path(name)
            writer = _ShardWriter(beside, shard_bytes, say)
            num_merged, num_shards = _write_model(model, config.compute_dtype, writer, known)
            _write_tokenizer(source, base, location, beside)
            _move(beside, folder)
    return MergeResult(
        folder=folder,
        base_model=base,
        num_tensors=len(writer.names),
        num_merged=num_merged,
        num_shards=num_shards,
        num_bytes=writer.num_bytes,
    )


def _write_model(
    model: Any, compute_dtype: str, writer: _ShardWriter, known: set[str] | None
) -> tuple[int, int]:
    """Write weights and config; return how many weights were merged, and the number of files."""
    num_merged = _write_weights(model, getattr(torch, compute_dtype), writer)
    _refuse_other_names(writer.names, known)
    num_shards = writer.finish()
    _write_config(model.get_base_model(), compute_dtype, writer.folder)
    return num_merged, num_shards


def _refuse_kind(name: str, config: Any) -> None:
    """Refuse adapters whose effect is more than a sum of weights."""
    wishes = (
        [] if str(config.peft_type.value) == "LORA" else [f"peft_type {config.peft_type.value}"]
    )
    options = ("lora_bias", "trainable_token_indices", "layer_replication")
    wishes += [option for option in options if getattr(config, option, None)]
    if getattr(config, "bias", "none") != "none":
        wishes.append(f"bias={config.bias!r}")
    if wishes:
        raise UnsupportedModelError(
            "merge-kind",
            f"the adapter {name} has {', '.join(wishes)}, which is not merged here",
            remedies=[
                "keep it as an adapter",
                "merge with PEFT's merge_and_unload on a 16-bit base",
            ],
            adapter=name,
            wishes=wishes,
        )


def _write_weights(model: Any, dtype: torch.dtype, writer: _ShardWriter) -> int:
    """Write all weights, a decoder layer at a time; return how many the adapter changed."""
    base = model.get_base_model()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            _to_float32(module)
    num_merged = 0
    seen: set[int] = set()
    for group in _groups(base):
        tensors: Tensors = {}
        for path, module in group:
            own = {name: id(weight) for name, weight in module._parameters.items()}
            for name, tensor in _own_weights(path, module).items():
                if own.get(name.rpartition(".")[2]) not in seen:  # tied ones are written once
                    tensors[name] = _stored(tensor, dtype)
            seen |= set(own.values())
            num_merged += isinstance(module, BaseTunerLayer)
        # Transformers may name weights, or cut them, otherwise in memory than in files.
        writer.add(revert_weight_conversion(base, tensors))
    return num_merged


def _to_float32(module: nn.Module) -> None:
    """Let the update be summed in float32, whatever type the adapter was saved in."""
    for name, parameter in module.named_parameters():
        if _LORA_PARTS in name:
            parameter.data = parameter.data.float()


def _groups(base: Any) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the modules of each decoder layer together, and all others one by one."""
    layers = {layer.path: layer.module for layer in find_decoder_layers(base)}
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    for path, module in base.named_modules():
        if path in layers:
            yield [
                (".".join(filter(None, (path, name))), each)
                for name, each in module.named_modules()
            ]
        elif id(module) not in inside:
            yield [(path, module)]


def _own_weights(path: str, module: nn.Module) -> Tensors:
    """Return the weights that are a module's own, merged, under the base's names."""
    is_part = f".{_LORA_PARTS}" in f".{path}" or ".original_module" in path
    if is_part or isinstance(module, ModulesToSaveWrapper):
        return {}
    own: dict[str, Any] = {}
    if isinstance(module, BaseTunerLayer):
        layer = module.get_base_layer()
        own["weight"] = _as_stored(layer, _dense(layer) + module.get_delta_weight(_ADAPTER))
    elif isinstance(module, bnb.nn.Linear4bit):
        own["weight"] = _as_stored(module, _dense(module))
        if module.bias is not None:
            own["bias"] = module.bias
    else:
        module._save_to_state_dict(own, "", keep_vars=False)
    if path.endswith(".base_layer"):
        own.pop("weight")  # the layer around it has it
    plain = path.replace(".base_layer", "").replace(f".modules_to_save.{_ADAPTER}", "")
    return {f"{plain}.{name}" if plain else name: tensor for name, tensor in own.items()}


def _dense(module: Any) -> torch.Tensor:
    """Return the weight of a layer that may be packed."""
    weight: torch.Tensor = module.weight.data
    if isinstance(module, StreamedLinear4bit):
        with module.handle.hold() as (packed, state):
            weight = bnb.functional.dequantize_4bit(packed.view(-1, 1), state)
    elif isinstance(module, bnb.nn.Linear4bit):
        weight = bnb.functional.dequantize_4bit(weight, module.weight.quant_state)
    return weight


def _as_stored(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """Turn a weight the way it lies in files: GPT-2's layers are packed transposed."""
    return weight.T if issubclass(getattr(module, "source_cls", nn.Linear), Conv1D) else weight


def _stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy on the host; what is no float keeps its type."""
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=wanted, copy=True).contiguous()


class _ShardWriter:
    """Writes tensors into files of a bounded size.

    Args:
        folder: Where they go.
        shard_bytes: Of one file; a single tensor may be larger.
        say: Told of each file.

    Attributes:
        names: Of all tensors so far.
        num_bytes: Of all tensors so far.
    """

    def __init__(self, folder: Path, shard_bytes: int, say: Callable[[str], None]) -> None:
        self.names: set[str] = set()
        self.num_bytes = 0
        self._files: dict[str, int] = {}
        self.folder = folder
        self._shard_bytes = shard_bytes
        self._say = say
        self._open: Tensors = {}
        self._open_bytes = 0
        self._count = 0

    def add(self, tensors: Tensors) -> None:
        """Take tensors, each once; tied ones come under one name."""
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            if self._open and self._open_bytes + size > self._shard_bytes:
                self._flush()
            self._open[name] = tensor.contiguous()
            self.names.add(name)
            self._open_bytes += size
            self.num_bytes += size

    def finish(self) -> int:
        """Write what is left and the index, give files their names, and return their number."""
        self._flush()
        names = {
            number: _SINGLE
            if self._count == 1
            else f"model-{number:05d}-of-{self._count:05d}.safetensors"
            for number in range(1, self._count + 1)
        }
        for number, name in names.items():
            self._path(number).rename(self.folder / name)
        if self._count > 1:
            index = {
                "metadata": {"total_size": self.num_bytes},
                "weight_map": {name: names[number] for name, number in self._files.items()},
            }
            (self.folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        return self._count

    def _flush(self) -> None:
        if not self._open:
            return
        self._count += 1
        self._say(f"writing file {self._count}, {self.num_bytes / 1e9:.1f} GB so far")
        self._files |= dict.fromkeys(self._open, self._count)
        save_file(self._open, self._path(self._count), metadata={"format": "pt"})
        self._open, self._open_bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number}"


def _stored_names(source: Repository) -> set[str] | None:
    """Return the names of the base's weights in its files, or None where those have other names."""
    index = source.find(_INDEX)
    if index is not None:
        names = json.loads(index.read_text())["weight_map"]
    else:
        single = source.find(_SINGLE)
        if single is None:
            return None
        with safe_open(single, framework="pt") as file:
            names = file.keys()
    return {name for name in names if not any(part in name for part in _QUANT_PARTS)}


def _refuse_other_names(written: set[str], known: set[str] | None) -> None:
    """Refuse names that the base's own files do not have: nobody could load them."""
    other = sorted(written - known) if known is not None else []
    if other:
        raise UnsupportedModelError(
            "merge-names",
            f"{len(other)} weights would get names that the base's files do not have: "
            f"{name_offenders(other)}",
            remedies=["keep the adapter as it is", "report it with the name of the model"],
            names=other,
        )


def _write_tokenizer(source: Repository, base: str, location: dict[str, Any], folder: Path) -> None:
    """Write the adapter's tokenizer, which has the template of its training, else the base's."""
    has_own = source.find("tokenizer_config.json") is not None
    try:
        if has_own:
            tokenizer = AutoTokenizer.from_pretrained(source.name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(base, **location)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "tokenizer",
            f"neither {source.name} nor {base} has a tokenizer that can be used: {error}",
            remedies=["put the tokenizer's files into the folder of the adapter"],
            model=base,
        ) from error
    tokenizer.save_pretrained(folder)


def _write_config(base: Any, dtype: str, folder: Path) -> None:
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    config.save_pretrained(folder)
    if base.can_generate():
        base.generation_config.save_pretrained(folder)


def _move(beside: Path, folder: Path) -> None:
    """Move all files in, the one that makes them a model last."""
    for path in sorted(beside.iterdir(), key=lambda path: path.name == "config.json"):
        path.replace(folder / path.name)

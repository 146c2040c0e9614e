"""The packed form of one 4-bit weight: which tensors it is, taken apart and put together again.

A bitsandbytes weight is a packed tensor plus a QuantState. Everything that differs from weight to
weight is bytes, and those live in the store; the two lookup tables are the same for all weights
and stay on the device; the rest is numbers.

Source: bitsandbytes `QuantState` and `quantize_4bit`; QLoRA, arXiv 2305.14314, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState

from poros_hf.errors import UnsupportedModelError, refuse_copy
from poros_hf.store import TensorSpec

WEIGHT_BLOCK = 64
ABSMAX_BLOCK = 256
# nf4 is what this package writes; fp4 comes from checkpoints that others have quantised.
QUANT_TYPES = ("nf4", "fp4")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """How weights are quantised, as far as it decides the size of the result.

    Attributes:
        is_nested: The block scales are quantised as well (double quantisation).
        storage: Type that the packed bytes are kept in.
    """

    is_nested: bool
    storage: torch.dtype = torch.uint8


def tensor_specs(name: str, shape: tuple[int, int], layout: WeightFormat) -> list[TensorSpec]:
    """Return the tensors that one weight of `shape` [out, in] becomes, named `name.part`."""
    num_weights = math.prod(shape)
    num_blocks = -(-num_weights // WEIGHT_BLOCK)
    packed_items = -(-num_weights // 2) // layout.storage.itemsize
    packed = TensorSpec(f"{name}.packed", layout.storage, (packed_items, 1))
    if not layout.is_nested:
        return [packed, TensorSpec(f"{name}.absmax", torch.float32, (num_blocks,))]
    return [
        packed,
        TensorSpec(f"{name}.absmax", torch.uint8, (num_blocks,)),
        TensorSpec(f"{name}.nested_absmax", torch.float32, (-(-num_blocks // ABSMAX_BLOCK),)),
        TensorSpec(f"{name}.offset", torch.float32, ()),
    ]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """What is left of a weight once its bytes are in the store.

    Attributes:
        name: Prefix of its tensors in the store.
        state: Its QuantState with no bytes: `absmax`, `offset` and `state2.absmax` are empty,
            the lookup tables are device tensors shared by all weights of the model.
    """

    name: str
    state: QuantState

    def over(self, views: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, QuantState]:
        """Put the weight together over tensors from a slot or from the store.

        Returns:
            The packed weight, [items, 1], and its QuantState; both read `views` and are valid as
            long as those are.
        """
        tables = self.state
        state2 = None
        if tables.nested:
            state2 = QuantState(
                absmax=views[f"{self.name}.nested_absmax"],
                code=tables.state2.code,
                blocksize=tables.state2.blocksize,
                dtype=tables.state2.dtype,
            )
        state = QuantState(
            absmax=views[f"{self.name}.absmax"],
            shape=tables.shape,
            code=tables.code,
            blocksize=tables.blocksize,
            quant_type=tables.quant_type,
            dtype=tables.dtype,
            offset=views[f"{self.name}.offset"] if tables.nested else None,
            state2=state2,
        )
        return views[f"{self.name}.packed"], state

    def tables_key(self) -> Hashable:
        """Return what is left of the weight, as something to compare; tables count as themselves.

        The tables are shared by all weights of a model and live as long as it does.
        """
        state, nested = self.state, self.state.state2 if self.state.nested else None
        key = (state.quant_type, state.blocksize, state.dtype, tuple(state.shape), id(state.code))
        return key if nested is None else (*key, nested.blocksize, nested.dtype, id(nested.code))

    def on(self, device: torch.device) -> PackedWeight:
        """Return the same weight with its lookup tables on another device."""
        tables = _copy_tables(self.state)
        tables.code = tables.code.to(device)
        if tables.nested:
            tables.state2.code = tables.state2.code.to(device)
        return replace(self, state=tables)


class TableCache:
    """Keeps one copy of each lookup table, however many weights bring their own."""

    def __init__(self) -> None:
        self._tables: dict[tuple[torch.dtype, bytes], torch.Tensor] = {}

    def shared(self, table: torch.Tensor) -> torch.Tensor:
        """Return the first table that was seen with these values."""
        bits = table.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return self._tables.setdefault((table.dtype, bits), table)


def take_apart(
    name: str, weight: bnb.nn.Params4bit, tables: TableCache
) -> tuple[PackedWeight, dict[str, torch.Tensor]]:
    """Split a quantised weight into what stays and the tensors that go to the store.

    The module that bitsandbytes tied the weight to forgets its QuantState: a second reference
    would keep the block scales of every weight on the device.

    Raises:
        UnsupportedModelError: The weight has other block sizes than are planned for.
    """
    state = weight.quant_state
    _check_format(name, state)
    module = getattr(weight, "module", None)
    if module is not None:
        module.quant_state = None
    tensors = {f"{name}.packed": weight.data, f"{name}.absmax": state.absmax}
    if state.nested:
        tensors[f"{name}.nested_absmax"] = state.state2.absmax
        tensors[f"{name}.offset"] = state.offset
    rest = _copy_tables(state)
    rest.code = tables.shared(state.code)
    if rest.nested:
        rest.state2.code = tables.shared(state.state2.code)
    return PackedWeight(name, rest), tensors


def placeholder(weight: bnb.nn.Params4bit) -> HostParams4bit:
    """Return a stand-in for a weight whose bytes are in the store.

    It has the weight's shape, type and device, which PEFT and Trainer look at, over one item of
    memory.
    """
    item = torch.empty((1, 1), dtype=weight.dtype, device=weight.device)
    return HostParams4bit(
        item.expand(weight.shape),
        requires_grad=False,
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
        bnb_quantized=True,
    )


class NotResidentError(UnsupportedModelError, AttributeError):
    """A streamed weight was asked for values that only the store has.

    Also an AttributeError, so that `getattr(weight, "quant_state", None)` answers None.
    """


class HostParams4bit(bnb.nn.Params4bit):  # type: ignore[misc] # bitsandbytes has no types
    """Stand-in parameter of a streamed weight; see `placeholder`."""

    @property
    def quant_state(self) -> QuantState:
        """Refuse: merging, DoRA and the like read the base weight through this attribute."""
        raise NotResidentError(
            "weight-not-resident",
            "the values of a streamed weight are in the host store and cannot be read here; "
            "merging into it, and adapters that start from the base weight (DoRA, PiSSA, LoftQ, "
            "OLoRA, CorDA, EVA), are not supported",
            remedies=[
                "use plain LoRA (init_lora_weights=True, use_dora=False)",
                "merge into a model loaded without PorosConfig",
            ],
        )

    @quant_state.setter
    def quant_state(self, value: QuantState | None) -> None:
        """Ignore: bitsandbytes assigns it while the parameter is made."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse to copy a model whose base is one run of host memory."""
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to pickle a model whose base is one run of host memory."""
        refuse_copy()


# PEFT and transformers count 4-bit parameters by the name of their class.
HostParams4bit.__name__ = "Params4bit"


def _copy_tables(state: QuantState) -> QuantState:
    nothing = torch.empty(0)
    state2 = None
    if state.nested:
        state2 = QuantState(
            absmax=nothing,
            code=state.state2.code,
            blocksize=state.state2.blocksize,
            dtype=state.state2.dtype,
        )
    return QuantState(
        absmax=nothing,
        shape=state.shape,
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
        offset=nothing if state.nested else None,
        state2=state2,
    )


def _check_format(name: str, state: QuantState) -> None:
    nested_block = state.state2.blocksize if state.nested else ABSMAX_BLOCK
    found = (state.quant_type, state.blocksize, nested_block)
    if found[0] not in QUANT_TYPES or found[1:] != (WEIGHT_BLOCK, ABSMAX_BLOCK):
        raise UnsupportedModelError(
            "quant-format",
            f"{name} is {found[0]} with blocks of {found[1]} weights and {found[2]} scales; "
            f"nf4 and fp4 are streamed with {WEIGHT_BLOCK} and {ABSMAX_BLOCK}",
            remedies=["quantise the original 16-bit checkpoint instead"],
            name=name,
        )

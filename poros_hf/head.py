"""HostWeight: the parameter that stands for the embedding or the head in the model.

[Note: a weight without memory]
It has shape, type and device of the weight and no storage. Whoever uses it the usual ways gets
what stock gives: `F.embedding` gathers rows, a slice of rows (which is how TRL's fused head reads
it) stages them, `F.linear` has the whole matrix for as long as it runs. Any other operation reads
a copy of the whole matrix, with a warning; writing is refused. So module classes, module paths
and other packages' code stay what they are, tied weights are one parameter in two modules, and
nothing can compute with bytes that are not there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F  # its usual name
from torch import nn
from torch.utils._pytree import tree_map

from poros_hf.errors import UnsupportedModelError, refuse_copy
from poros_hf.matrix import HostMatrix
from poros_hf.units import format_bytes

logger = logging.getLogger(__name__)


class HostWeight(nn.Parameter):
    """A frozen parameter over a matrix of the host store; see the note above.

    Args:
        matrix: Where the values are.
    """

    matrix: HostMatrix
    has_warned: bool

    @staticmethod
    def __new__(cls, matrix: HostMatrix) -> HostWeight:
        """Make a tensor without storage."""
        weight: HostWeight = torch.Tensor._make_wrapper_subclass(
            cls, matrix.spec.shape, dtype=matrix.spec.dtype, device=matrix.device
        )
        weight.matrix = matrix
        weight.has_warned = False
        return weight

    def __init__(self, matrix: HostMatrix) -> None:
        """Do nothing more: `__new__` has made it."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the weight without reading it."""
        spec = self.matrix.spec
        return f"HostWeight({self.matrix.key}, shape={spec.shape}, dtype={spec.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a resident copy: PEFT copies a module in order to train the copy."""
        copy = nn.Parameter(self.matrix.whole().clone(), requires_grad=False)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to pickle a weight that lies once in host memory."""
        refuse_copy()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer the uses that have a way of their own."""
        kwargs = kwargs or {}
        own = _USES.get(func)
        if own is not None:
            result = own(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares none
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Gather for an embedding; give every other operation the whole matrix to read."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.embedding.default and isinstance(args[0], HostWeight):
            return args[0].matrix.gather(args[1])
        _refuse_write(func, args, kwargs)
        is_copy = func is torch.ops.aten._to_copy.default
        to_host = is_copy and torch.device(kwargs.get("device") or "meta").type == "cpu"

        def read(value: Any) -> Any:
            if not isinstance(value, HostWeight):
                return value
            return value.matrix.host() if to_host else _read_whole(value, func)

        return func(*tree_map(read, args), **tree_map(read, dict(kwargs)))


def _read_whole(weight: HostWeight, func: Any) -> torch.Tensor:
    if not weight.has_warned:
        weight.has_warned = True
        logger.warning(
            "%s reads the whole %s, which is in the host store: %s of device memory and of "
            "transfers each time it does",
            func,
            weight.matrix.key,
            format_bytes(weight.matrix.spec.num_bytes),
        )
    return weight.matrix.whole()


def _refuse_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False)]
    given += [(item, kwargs[item.name]) for item in arguments if item.name in kwargs]
    for argument, value in given:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(value, HostWeight):
            _refuse_change(value, f"{func} writes into it")


def _refuse_change(weight: HostWeight, what: str) -> NoReturn:
    raise UnsupportedModelError(
        "host-weight",
        f"the {weight.matrix.key} lies frozen in the host store, and {what}",
        remedies=[
            "train a copy of it: LoraConfig(modules_to_save=[...])",
            "change the checkpoint before it is loaded",
        ],
        key=weight.matrix.key,
    )


def _linear(x: Any, weight: Any, bias: torch.Tensor | None = None) -> Any:
    """Multiply as stock does, with the whole matrix on the device while it is read.

    Autograd would keep the matrix from forward to backward; it keeps where it is instead.
    """
    if not isinstance(weight, HostWeight) or isinstance(x, HostWeight):
        return NotImplemented
    matrix = weight.matrix
    whole = matrix.whole()
    if matrix.is_resident:
        return F.linear(x, whole, bias)
    address = whole.untyped_storage().data_ptr()

    def pack(saved: torch.Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != address:
            return saved
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(saved: Any) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else matrix.whole().as_strided(*saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return F.linear(x, whole, bias)


def _get_item(weight: Any, index: Any) -> Any:
    """Stage a run of rows."""
    if not isinstance(weight, HostWeight) or not isinstance(index, slice):
        return NotImplemented
    start, end, step = index.indices(weight.matrix.num_rows)
    return weight.matrix.rows(start, end) if step == 1 and start < end else NotImplemented


def _set_item(weight: Any, index: Any, value: Any) -> Any:
    if isinstance(weight, HostWeight):
        _refuse_change(weight, "rows of it are assigned")
    return NotImplemented


def _get_data(weight: HostWeight) -> HostWeight:
    return weight


def _set_data(weight: HostWeight, value: torch.Tensor) -> None:
    """Become an ordinary parameter with this value, as a cast or a resize asks for."""
    if value is weight:
        return
    logger.warning(
        "the %s was given a new value of %s: from now on it takes %s of device memory instead of "
        "being read from the host store",
        weight.matrix.key,
        value.dtype,
        format_bytes(value.nbytes),
    )
    torch.utils.swap_tensors(weight, nn.Parameter(value.detach(), requires_grad=False))


def _may_set_data(weight: Any, value: Any) -> Any:
    """Tell `Module.to` how to put a moved or cast weight back."""
    if not isinstance(weight, HostWeight):
        return NotImplemented
    if value.device != weight.matrix.device:
        raise UnsupportedModelError(
            "moved",
            f"a streamed model computes on {weight.matrix.device} and its {weight.matrix.key} "
            f"cannot be moved to {value.device}",
            remedies=["load it anew with device_map naming the other device"],
            device=str(value.device),
        )
    return True


def _require_grad(weight: HostWeight, requires_grad: bool = True) -> Any:
    if requires_grad:
        _refuse_change(weight, "was to be trained")
    return NotImplemented


def _detach(weight: HostWeight) -> torch.Tensor:
    """Return the values over the store's own memory: a state dict is what asks for them."""
    return weight.matrix.host()


def _storage(weight: HostWeight) -> Any:
    """Return the storage of the values, by which packages tell weights apart."""
    return weight.matrix.host().untyped_storage()


_USES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.Tensor.__getitem__: _get_item,
    torch.Tensor.__setitem__: _set_item,
    torch.Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__: _require_grad,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: _require_grad,
    torch.Tensor.detach: _detach,
    torch.Tensor.untyped_storage: _storage,
    torch._has_compatible_shallow_copy_type: _may_set_data,
}

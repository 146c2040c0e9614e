"""The embedding and the head of a model: what of them can be kept in the host store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from poros_hf.matrix import WEIGHT
from poros_hf.store import EMBEDDING, HEAD, TensorSpec


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """One matrix of the model, and every module that has it: tied weights have two.

    Attributes:
        key: Its entry in the store.
        users: Module path -> module with the matrix as its `weight`.
    """

    key: str
    users: dict[str, nn.Module]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the matrix as a parameter of the model."""
        return tuple(f"{path}.{WEIGHT}" for path in self.users)

    @property
    def spec(self) -> TensorSpec:
        """Type and shape."""
        weight = next(iter(self.users.values())).get_parameter(WEIGHT)
        return TensorSpec(WEIGHT, weight.dtype, tuple(weight.shape))


def find_dense(model: Any) -> list[DenseWeight]:
    """Find the embedding and the head of a model, as far as the host store can keep them.

    What an adapter has wrapped or replaced stays where it is, and so do a head that is 4-bit or a
    classifier, and an embedding that changes its own rows (`max_norm`).

    Args:
        model: A transformers model; it may be on the meta device.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    found: list[DenseWeight] = []
    if isinstance(embedding, nn.Embedding) and embedding.max_norm is None:
        found.append(DenseWeight(EMBEDDING, _users(model, embedding)))
    if type(head) is nn.Linear:
        users = _users(model, head)
        if not any(item.users.keys() & users.keys() for item in found):
            found.append(DenseWeight(HEAD, users))
    return found


def _users(model: Any, module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have, or will have once tied, the weight of `module`."""
    modules = dict(model.named_modules())
    weight = module.get_parameter(WEIGHT)
    users = {
        path: other
        for path, other in modules.items()
        if vars(other)["_parameters"].get(WEIGHT) is weight
    }
    # transformers ties the weights of a model that is being loaded when they are there.
    for pair in getattr(model, "all_tied_weights_keys", {}).items():
        paths = [name.removesuffix(f".{WEIGHT}") for name in pair]
        if users.keys() & set(paths):
            users.update({path: modules[path] for path in paths if path in modules})
    return users

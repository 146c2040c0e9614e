"""Replayed layers under DistributedDataParallel, in a world of one, give what stock layers give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.unit.replayed_layers import are_equal, forward, gradients, make_hidden, make_pair


class Stack(nn.Module):
    """Layers one behind the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        frozen = [name for name, value in self.named_parameters() if not value.requires_grad]
        self._ddp_params_and_buffers_to_ignore = frozen

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states, [rows, tokens, width] in and out."""
        return forward(list(self.layers), hidden)


@pytest.fixture
def _world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
def test_gradients_of_every_rank_equal_stock(find_unused: bool, static_graph: bool) -> None:
    """A tensor that nothing uses has no gradient in either, or one of zeros in both."""
    pair = make_pair()
    if not find_unused:
        for layer in (*pair.stock, *pair.streamed):
            layer.unused.requires_grad_(False)
    results = []
    for layers in (pair.stock, pair.streamed):
        model = DistributedDataParallel(
            Stack(layers), find_unused_parameters=find_unused, static_graph=static_graph
        )
        for seed in range(3):
            model.zero_grad()
            model(make_hidden(seed=seed)).square().sum().backward()
        results.append(gradients(layers))
    assert [it is None for it in results[0]] == [it is None for it in results[1]]
    assert are_equal(*results)
    assert pair.replayer.num_records > 0

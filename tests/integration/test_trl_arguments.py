"""TRL's own ways to load a model: by name, with the quantisation beside it or inside its kwargs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from poros_hf import PorosConfig, PorosStreaming
from poros_hf.hf.session import find_session


def float32_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "poros_hf.hf.quantizer"]


def test_model_name_with_quantization_config_streams_and_warns_of_float32(
    tiny_model: Path, make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(
        str(tiny_model), callbacks=[PorosStreaming()], quantization_config=PorosConfig(block_size=2)
    )
    trainer.train()
    (message,) = float32_warnings(caplog)
    model = trainer.model.get_base_model()
    stays = [*model.model.embed_tokens.parameters(), *model.lm_head.parameters()]
    assert {parameter.dtype for parameter in stays} == {torch.float32}
    assert "KiB" in message
    assert "model_init_kwargs" in message
    assert find_session(model).streamer.plan.num_blocks == 7


def test_model_name_with_model_init_kwargs_streams_in_bfloat16_without_a_warning(
    tiny_model: Path, make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(
        str(tiny_model),
        callbacks=[PorosStreaming()],
        model_init_kwargs={"quantization_config": PorosConfig(), "dtype": "bfloat16"},
    )
    trainer.train()
    assert float32_warnings(caplog) == []
    assert trainer.model.get_base_model().model.embed_tokens.weight.dtype == torch.bfloat16
    assert find_session(trainer.model).streamer.moved_bytes > 0

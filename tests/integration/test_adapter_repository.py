"""One call rebuilds the streamed model and its adapter from what a training left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer

import poros_hf
from poros_hf import PorosConfig, PorosStreaming, PorosTrainer
from poros_hf.errors import PorosError
from poros_hf.hf.session import find_session
from tests.hub_stub import REPOSITORY, TOKEN, StubHub, serve
from tests.integration.stock import IDS, logits
from tests.integration.test_poros_trainer import ROWS, SHORT

ROOT = Path(__file__).parents[2]
CONFIG = PorosConfig(block_size=3, double_quant=False)
REMOTE = """
import sys
import torch
import poros_hf
from poros_hf.hf.session import find_session

model = poros_hf.from_pretrained(sys.argv[1], token=sys.argv[2])
session = find_session(model)
torch.save(model.eval()(torch.arange(1, 33).view(2, 16)).logits.detach(), sys.argv[3])
print(session.config.block_size, session.config.double_quant)
"""


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Train once; return the adapter's folder and the logits of the trained model."""
    folder = tmp_path_factory.mktemp("adapters")
    trainer = PorosTrainer.from_pretrained(
        tiny_model, lora_rank=4, lora_alpha=8, block_size=3, double_quant=False
    )
    trainer.train(ROWS, output_dir=folder / "run", **SHORT)
    return trainer.save(folder / "adapter"), logits(trainer.model)


@pytest.fixture
def adapter(trained: tuple[Path, Any], tmp_path: Path) -> Path:
    """Copy the adapter, to be spoilt."""
    return Path(shutil.copytree(trained[0], tmp_path / "adapter"))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where weights would be read."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)


def refused(*args: Any, **kwargs: Any) -> PorosError:
    with pytest.raises(PorosError) as caught:
        poros_hf.from_pretrained(*args, **kwargs)
    return caught.value


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_from_pretrained_rebuilds_the_trained_model_bit_for_bit(trained: tuple[Path, Any]) -> None:
    folder, expected = trained
    model = poros_hf.from_pretrained(folder)
    assert isinstance(model, PeftModel)
    assert find_session(model).config == CONFIG
    assert torch.equal(logits(model), expected)
    with model.disable_adapter():
        assert not torch.equal(logits(model), expected)


def test_from_pretrained_rebuilds_from_a_checkpoint_of_sft_trainer(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(
        load_streamed(CONFIG),
        callbacks=[PorosStreaming()],
        save_strategy="steps",
        save_steps=3,
    )
    trainer.train()
    model = poros_hf.from_pretrained(tmp_path / "run" / "checkpoint-3")
    assert find_session(model).config == CONFIG
    assert torch.equal(logits(model), logits(trainer.model))


def test_save_model_of_sft_trainer_lies_beside_the_config(
    load_streamed: Callable[..., Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    given = PorosConfig(block_size=3, num_slots=3, double_quant=False)
    trainer = make_trainer(load_streamed(CONFIG), callbacks=[PorosStreaming(given)])
    trainer.train()
    trainer.save_model()
    assert PorosConfig.from_pretrained(tmp_path / "run") == given
    assert torch.equal(logits(poros_hf.from_pretrained(tmp_path / "run")), logits(trainer.model))


def test_from_pretrained_follows_the_config_that_is_passed(trained: tuple[Path, Any]) -> None:
    folder, expected = trained
    given = PorosConfig(block_size=1, num_slots=4, double_quant=False)
    model = poros_hf.from_pretrained(folder, given)
    assert find_session(model).config == given
    assert torch.equal(logits(model), expected)


def test_from_pretrained_takes_the_default_config_when_there_is_none(adapter: Path) -> None:
    (adapter / "poros_config.json").unlink()
    assert find_session(poros_hf.from_pretrained(adapter)).config == PorosConfig()


def test_from_pretrained_gives_an_adapter_that_trains_on_when_asked(
    trained: tuple[Path, Any], tmp_path: Path
) -> None:
    model = poros_hf.from_pretrained(trained[0], is_trainable=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=1,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=Dataset.from_list([{"input_ids": list(range(1, 13))}]),
        callbacks=[PorosStreaming()],
    )
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert before
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_from_pretrained_gives_a_frozen_adapter_by_default(trained: tuple[Path, Any]) -> None:
    model = poros_hf.from_pretrained(trained[0])
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_from_pretrained_takes_another_place_for_the_base(
    adapter: Path, tiny_model: Path, trained: tuple[Path, Any]
) -> None:
    edit(adapter / "adapter_config.json", base_model_name_or_path="/gone/with/the/machine")
    model = poros_hf.from_pretrained(adapter, base_model=str(tiny_model))
    assert torch.equal(logits(model), trained[1])


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("name", ["/gone/with/the/machine", None, ""])
def test_from_pretrained_names_the_base_when_it_is_not_here(
    name: str | None, adapter: Path
) -> None:
    edit(adapter / "adapter_config.json", base_model_name_or_path=name)
    error = refused(adapter)
    assert (error.slug, error.details["base_model"]) == ("adapter-base", name)


@pytest.mark.usefixtures("no_weights")
def test_from_pretrained_refuses_an_adapter_that_reads_the_base(adapter: Path) -> None:
    edit(adapter / "adapter_config.json", use_dora=True)
    assert refused(adapter).slug == "adapter-kind"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("text", ["{", '{"peft_type": "NO_SUCH"}', "[]"])
def test_from_pretrained_names_the_adapter_when_its_config_is_not_understood(
    text: str, adapter: Path
) -> None:
    (adapter / "adapter_config.json").write_text(text)
    error = refused(adapter)
    assert (error.slug, error.details["repository"]) == ("adapter-config", str(adapter))


@pytest.mark.usefixtures("no_weights")
def test_from_pretrained_does_not_open_a_pickle_in_place_of_the_adapter(adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.rename(adapter / "adapter_model.bin")
    error = refused(adapter)
    assert (error.slug, error.details["file"]) == ("hub-file", "adapter_model.safetensors")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("values", "slug"), [({"schema_version": 7}, "config-schema"), ({"slots": 1}, "config-key")]
)
def test_from_pretrained_names_the_file_when_the_stored_config_is_refused(
    values: dict[str, Any], slug: str, adapter: Path
) -> None:
    edit(adapter / "poros_config.json", **values)
    error = refused(adapter)
    assert error.slug == slug
    assert str(adapter) in error.details["source"]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("arguments", [{"is_trainable": True}, {"base_model": "a/b"}])
def test_from_pretrained_refuses_arguments_of_adapters_for_a_model(
    arguments: dict[str, Any], tiny_model: Path
) -> None:
    assert refused(tiny_model, **arguments).slug == "not-an-adapter"


def test_from_pretrained_rebuilds_from_the_hub(trained: tuple[Path, Any], tmp_path: Path) -> None:
    folder, expected = trained
    with serve() as hub:
        hub.is_private = True
        for path in folder.iterdir():
            hub.put(path.name, path.read_bytes())
        printed = remote(hub, tmp_path, REPOSITORY, TOKEN, str(tmp_path / "logits.pt"))
    assert printed.split() == ["3", "False"]
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)
    asked = {path.rpartition("/")[2] for _, path in hub.requests}
    assert "adapter_model.bin" not in asked


def remote(hub: StubHub, home: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", REMOTE, *arguments],
        env={**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_ids_of_the_remote_process_are_those_of_this_one() -> None:
    assert torch.equal(IDS, torch.arange(1, 33).view(2, 16))

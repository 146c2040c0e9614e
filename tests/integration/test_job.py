"""The YAML file of a run: what `poros` reads it as, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from poros_hf import PorosConfig
from poros_hf.cli.job import read_job
from poros_hf.errors import ConfigError

GOOD = "model: some/model\ndataset: rows.jsonl\nmax_length: 128\nblock_size: 2\nr: 4\n"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text(GOOD + f"output_dir: {tmp_path / 'out'}\n")
    return path


def refusal(path: Path, *changes: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_job(path, changes)
    return caught.value


def test_file_reaches_every_part(written: Path) -> None:
    job = read_job(written)
    assert (job.own.model, job.own.dataset, job.own.split) == ("some/model", "rows.jsonl", "train")
    assert job.training.max_length == 128
    assert job.lora.r == 4
    assert job.streaming == PorosConfig(block_size=2)


def test_set_replaces_what_the_file_says(written: Path) -> None:
    changes = [
        "max_length=64",
        "target_modules=[q_proj]",
        "model_init_kwargs.attn_implementation=eager",
    ]
    job = read_job(written, changes)
    assert job.training.max_length == 64
    assert job.lora.target_modules == {"q_proj"}
    assert job.training.model_init_kwargs == {"attn_implementation": "eager"}


@pytest.mark.parametrize(
    ("other", "ours"),
    [("max_seq_length", "max_length"), ("seq_len", "max_length"), ("bf16_bitwise", "quantization")],
)
def test_names_of_other_trainers_are_refused_with_ours(
    other: str, ours: str, written: Path
) -> None:
    written.write_text(f"{GOOD}{other}: 1\n")
    error = refusal(written)
    assert error.slug == "train-file"
    assert f"{other} in {written}; it is called {ours} here" in str(error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("max_lengths=3", "did you mean max_length?"),
        ("max_length", "name=value"),
        ("max_length=ten", "max_length"),
        ("rank_pattern={a: [", "not a YAML value"),
        ("trust_remote_code=true", "command line only"),
        ("learning_rate_schedule=x", "unknown"),
        ("save_strategy=often", "often"),
    ],
)
def test_set_refuses_what_it_cannot_use(change: str, said: str, written: Path) -> None:
    error = refusal(written, change)
    assert error.slug == "train-file"
    assert said in str(error)


def test_values_out_of_range_keep_their_own_error(written: Path) -> None:
    error = refusal(written, "block_size=0")
    assert error.slug == "config-value"
    assert error.details["source"] == str(written)


def test_file_without_a_model_or_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("r: 4\n")
    assert "does not say: model, dataset" in str(refusal(path))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.yaml").details["path"] == str(tmp_path / "none.yaml")


def test_remote_code_is_allowed_by_the_command_line(written: Path) -> None:
    assert read_job(written, argv=["--trust_remote_code"]).training.trust_remote_code
    assert not read_job(written).training.trust_remote_code

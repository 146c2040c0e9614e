"""`poros init` writes a file that is valid, fits, and says what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poros_hf.cli.job import read_job
from poros_hf.cli.main import main
from tests.tiny import byte_tokenizer, tiny_config, write_tiny_model
from validation.experiments.parity.shapes import qwen_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny config and a tokenizer: init reads no weight."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    tiny_config("llama", max_position_embeddings=4096).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": "ab", "completion": "c" * (10 * number)} for number in range(1, 41)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def init(path: Path, model: Path, rows: Path, *words: str) -> int:
    return main(["init", str(path), "-m", str(model), "-d", str(rows), *words])


def test_init_writes_what_train_reads(model: Path, rows: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "train.yaml"
    assert init(path, model, rows) == 0
    job = read_job(path)
    assert (job.own.model, job.own.dataset) == (str(model), str(rows))
    assert job.training.max_length == 448  # 99 of 100 rows: just above 400 tokens
    assert job.training.output_dir == "outputs/tiny-llama-lora"
    assert job.streaming.vram_budget == "auto"
    assert job.lora.r == 16
    text = path.read_text()
    assert "40 rows with prompt, completion" in text
    assert "0 of those looked at are cut" in text
    assert "poros train" in capsys.readouterr().out


def test_init_never_writes_over_a_file(
    model: Path, rows: Path, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("mine")
    assert init(path, model, rows) == 1
    assert "[init-exists]" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert init(path, model, rows, "--force") == 0
    assert read_job(path).training.max_length == 448


def test_init_cuts_rows_that_do_not_fit(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "qwen"
    qwen_config("7b").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    path, long = tmp_path / "train.yaml", tmp_path / "long.jsonl"
    long.write_text(json.dumps({"text": "x" * 20_000}) + "\n")
    assert init(path, folder, long, "--vram", "8GiB") == 0
    length = read_job(path).training.max_length
    assert 512 < length < 20_000
    assert f"{20_032} would hold 99 of 100 and does not fit" in path.read_text()
    words = ["plan", str(path), "--vram", "8GiB", "--json"]
    assert main(words) == 0
    assert main([*words, "--set", f"max_length={length + 64}"]) == 1


def test_init_refuses_a_card_that_is_too_small(tmp_path: Path, rows: Path, capsys: Any) -> None:
    folder = tmp_path / "qwen"
    qwen_config("72b").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    path = tmp_path / "train.yaml"
    assert init(path, folder, rows, "--vram", "3GiB") == 1
    assert "[vram-budget]" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "slug"),
    [('{"a": 1}\n', "rows-columns"), ("", "rows-empty"), ("{broken\n", "rows-format")],
)
def test_init_refuses_rows_that_cannot_be_trained_on(
    text: str, slug: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    rows, path = tmp_path / "bad.jsonl", tmp_path / "train.yaml"
    rows.write_text(text)
    assert init(path, model, rows) == 1
    assert f"[{slug}]" in capsys.readouterr().err
    assert not path.exists()


def test_init_refuses_a_model_that_is_not_there(rows: Path, tmp_path: Path, capsys: Any) -> None:
    assert init(tmp_path / "train.yaml", tmp_path / "none", rows) == 1
    assert "[hub-folder]" in capsys.readouterr().err


def test_names_that_need_quotes_survive(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "a model: #1", "llama", num_hidden_layers=2)
    rows = tmp_path / "my: rows.jsonl"
    rows.write_text(json.dumps({"text": "some words"}) + "\n")
    path = tmp_path / "train.yaml"
    assert init(path, folder, rows) == 0
    job = read_job(path)
    assert (job.own.model, job.own.dataset) == (str(folder), str(rows))


def test_train_runs_the_file_that_init_wrote(tmp_path: Path, capsys: Any) -> None:
    folder = write_tiny_model(
        tmp_path / "model", "llama", num_hidden_layers=3, initializer_range=0.1
    )
    rows, path = tmp_path / "rows.jsonl", tmp_path / "train.yaml"
    rows.write_text("".join(json.dumps({"text": f"word {n}"}) + "\n" for n in range(8)))
    assert init(path, folder, rows) == 0
    out = f"output_dir={tmp_path / 'out'}"
    assert main(["train", str(path), "--set", out, "--set", "max_steps=2"]) == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()

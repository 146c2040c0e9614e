"""`poros plan`: from a config.json alone to what fits where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poros_hf.cli.main import main
from tests.tiny import tiny_config
from validation.experiments.parity.shapes import qwen_config

CARD = ["--vram", "12GiB", "--ram", "64GiB", "--link-gbps", "25"]


@pytest.fixture(scope="module")
def qwen_32b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only the config.json of a 32B model."""
    folder = tmp_path_factory.mktemp("qwen32b")
    qwen_config("32b").save_pretrained(folder)
    return folder


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    status = main(["plan", *words, "--json"])
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if values["fits"] else 1)
    return values


def test_plan_of_a_model_by_its_config_alone(qwen_32b: Path, capsys: Any) -> None:
    values = plan(capsys, "-m", str(qwen_32b), *CARD)
    assert values["fits"]
    made = values["plan"]
    assert made["needed_bytes"] <= 12 * 2**30
    assert made["workload"]["tokens"] == 1024
    assert made["link_ms"] == pytest.approx(made["moved_bytes_per_step"] / 25e6)
    assert 60e9 < values["disk_bytes"] < 70e9


def test_plan_lists_what_fits_on_which_card(qwen_32b: Path, capsys: Any) -> None:
    cards = plan(capsys, "-m", str(qwen_32b), *CARD)["cards"]
    assert [card["card_bytes"] // 2**30 for card in cards] == [8, 12, 16, 24]
    longest = [card["longest_tokens"] for card in cards]
    assert longest == sorted(set(longest))
    moved = [card["plan"]["moved_bytes_per_step"] for card in cards if card["fits"]]
    assert moved == sorted(moved, reverse=True)


def test_plan_says_what_each_setting_would_change(qwen_32b: Path, capsys: Any) -> None:
    settings = plan(capsys, "-m", str(qwen_32b), *CARD)["settings"]
    doubled = {item["name"]: item for item in settings if item["after"] == 2 * item["before"]}
    assert {"block_size", "per_device_train_batch_size", "max_length", "r"} <= set(doubled)
    halved = next(item for item in settings if item["after"] < item["before"])
    assert halved["needed_bytes"] < doubled["max_length"]["needed_bytes"]


def test_plan_as_it_is_takes_less_than_with_anything_doubled(qwen_32b: Path, capsys: Any) -> None:
    assert main(["plan", "-m", str(qwen_32b), *CARD]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("as it is"))
    least = [float(line.split("GiB")[0].split()[-1]) for line in lines[first : first + 4]]
    assert least[0] == min(least)


def test_plan_as_text_has_the_categories_and_tables(qwen_32b: Path, capsys: Any) -> None:
    assert main(["plan", "-m", str(qwen_32b), *CARD]) == 0
    text = capsys.readouterr().out
    for word in ("slots", "optimizer", "boundaries", "graphs", "host memory", "moved per step"):
        assert f"  {word} " in text
    assert "What fits where" in text
    assert "24 GiB" in text


def test_plan_that_does_not_fit_says_which_values_would(qwen_32b: Path, capsys: Any) -> None:
    words = ["-m", str(qwen_32b), "--vram", "6GiB", "--set", "per_device_train_batch_size=4"]
    values = plan(capsys, *words)
    assert not values["fits"]
    assert values["refusal"]["slug"] == "vram-budget"
    fits = values["refusal"]["fits"]
    assert main(["plan", *words]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    longest = fits["max_length"]
    assert plan(capsys, *words, "--set", f"max_length={longest}")["fits"]
    assert not plan(capsys, *words, "--set", f"max_length={longest + 64}")["fits"]


def test_plan_refuses_too_little_ram(qwen_32b: Path, capsys: Any) -> None:
    values = plan(capsys, "-m", str(qwen_32b), "--vram", "24GiB", "--ram", "8GiB")
    assert values["refusal"]["slug"] == "ram-budget"


def test_plan_reads_the_file_of_a_run(tmp_path: Path, capsys: Any) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "model")
    path = tmp_path / "train.yaml"
    path.write_text(
        f"model: {tmp_path / 'model'}\ndataset: rows.jsonl\noutput_dir: {tmp_path / 'out'}\n"
        "max_length: 64\nper_device_train_batch_size: 2\nr: 4\nblock_size: 2\n"
    )
    made = plan(capsys, str(path), "--set", "r=8")["plan"]
    assert (made["workload"]["tokens"], made["workload"]["rows"]) == (64, 2)
    assert made["workload"]["rank"] == 8
    assert made["num_blocks"] == 7
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        ([], "plan-what"),
        (["train.yaml", "-m", "some/model"], "plan-what"),
        (["-m", "./no/such/folder"], "hub-folder"),
        (["missing.yaml"], "train-file"),
    ],
)
def test_plan_refuses_what_it_cannot_plan(words: list[str], slug: str, capsys: Any) -> None:
    assert main(["plan", *words]) == 1
    assert f"[{slug}]" in capsys.readouterr().err


def test_plan_refuses_a_size_without_a_unit(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "-m", "some/model", "--vram", "12"])
    assert "'12GiB'" in capsys.readouterr().err

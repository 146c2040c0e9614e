"""The comparison of two sides sees every bit, and says so when a side did not finish."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests.unit.validation_records import MACHINE
from validation.experiments.parity import compare, run_all
from validation.experiments.parity.recipe import (
    RESULT,
    Arm,
    Model,
    Recipe,
    Streaming,
    gradient_file,
    read_arm,
)
from validation.experiments.parity.shard import write_shard
from validation.harness import classify, run, schema
from validation.harness.call import Call

ARM = Arm(
    name="toy-streamed-s2-b1",
    model=Model(path="p", id="toy", sha256="0"),
    recipe=Recipe(rows="random"),
    streaming=Streaming(),
)


def write_side(folder, side):
    """Leave what train_side leaves, after two steps."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for step in (1, 2):
        tensors = {
            f"layer.{n}.lora_{half}": torch.randn(4, 8, generator=generator).bfloat16()
            for n in range(3)
            for half in "AB"
        }
        write_shard(tensors, gradient_file(folder, step))
    result = {
        "side": side,
        "started": "20300101T000000Z",
        "command": ["x"],
        "status": "ok",
        "error": None,
        "samples": [
            {"step": step, "loss": 2.0 / step, "grad_max_abs": 1.0, "step_ms": 5.0}
            for step in (1, 2)
        ],
        "data": {"id": "x", "sha256": "0"},
        "num_layers": 3,
        "adapter_sha256": "0",
        "nondeterministic": [],
        "imports_poros_hf": side == "streamed",
    }
    (folder / RESULT).write_text(json.dumps(result))


def edit_result(folder, **changes):
    result = json.loads((folder / RESULT).read_text())
    (folder / RESULT).write_text(json.dumps({**result, **changes}))


@pytest.fixture
def sides(tmp_path):
    folders = (tmp_path / "resident", tmp_path / "streamed")
    for folder in folders:
        write_side(folder, folder.name)
    return folders


def read_gradients(folder, step):
    from safetensors.torch import load_file

    return load_file(gradient_file(folder, step))


def test_equal_sides_give_a_valid_record_of_zeros(sides, tmp_path):
    record = compare.make_record(ARM, sides, MACHINE)
    assert schema.problems(record) == []
    assert compare.is_equal(record)
    assert [sample["max_abs_diff"] for sample in record["samples"]] == [0.0, 0.0]
    assert record["samples"][0]["num_tensors"] == 6
    assert record["samples"][0]["loss_resident"] == record["samples"][0]["loss_streamed"] == 2.0
    assert run.write(record, tmp_path / "artifacts").exists()


def test_one_bit_of_one_gradient_is_seen(sides):
    """The planted difference of the protocol: one unit in the last place, in the second step."""
    tensors = read_gradients(sides[1], 2)
    planted = tensors["layer.1.lora_B"]
    planted.view(torch.int16)[2, 3] += 1
    gradient_file(sides[1], 2).unlink()
    write_shard(tensors, gradient_file(sides[1], 2))
    record = compare.make_record(ARM, sides, MACHINE)
    assert not compare.is_equal(record)
    assert [sample["num_unequal"] for sample in record["samples"]] == [0, 1]
    expected = (planted.double() - read_gradients(sides[0], 2)["layer.1.lora_B"].double()).abs()
    assert record["samples"][1]["max_abs_diff"] == expected.max().item() > 0
    assert "1 of 6 unequal" in compare.verdict(record)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"adapter_sha256": "1"}, "adapter_bytes_equal"),
        ({"data": {"id": "y", "sha256": "1"}}, "data_equal"),
        ({"nondeterministic": ["x does not have a deterministic implementation"]}, "deterministic"),
    ],
)
def test_a_failed_check_is_not_equal(sides, change, check):
    edit_result(sides[1], **change)
    record = compare.make_record(ARM, sides, MACHINE)
    assert record["checks"][check] is False
    assert not compare.is_equal(record)


def test_a_resident_side_that_imports_the_package_is_no_reference(sides):
    edit_result(sides[0], imports_poros_hf=True)
    assert not compare.make_record(ARM, sides, MACHINE)["checks"]["resident_is_stock"]


def test_other_tensors_are_refused(sides):
    tensors = read_gradients(sides[1], 1)
    del tensors["layer.0.lora_A"]
    gradient_file(sides[1], 1).unlink()
    write_shard(tensors, gradient_file(sides[1], 1))
    with pytest.raises(ValueError, match="different names"):
        compare.make_record(ARM, sides, MACHINE)


def test_a_stopped_side_gives_a_cancelled_record(sides):
    shutil.rmtree(sides[1])
    record = compare.make_record(ARM, sides, MACHINE)
    assert schema.problems(record) == []
    assert record["status"] == "cancelled"
    assert not compare.is_equal(record)


@pytest.mark.parametrize("differs", [False, True])
def test_a_side_that_was_stopped_leaves_the_steps_until_then(sides, differs):
    result = json.loads((sides[1] / RESULT).read_text())
    stopped = {key: result[key] for key in ("side", "command")} | {"samples": result["samples"][:1]}
    stopped |= {"status": "cancelled", "error": "told to stop"}
    if differs:
        shutil.copy(gradient_file(sides[1], 2), gradient_file(sides[1], 1))
    pair = (compare.read_side(sides[0]), stopped)
    record = compare.compare_sides(ARM, sides, pair, MACHINE)
    assert schema.problems(record) == []
    assert record["status"] == ("error" if differs else "cancelled")
    assert [sample["num_unequal"] for sample in record["samples"]] == [6 if differs else 0]
    assert not compare.is_equal(record)
    assert not classify.is_complete(record)


def test_sides_of_different_length_are_an_error(sides):
    samples = json.loads((sides[1] / RESULT).read_text())["samples"]
    edit_result(sides[1], samples=samples[:1])
    assert compare.make_record(ARM, sides, MACHINE)["status"] == "error"


def test_an_arm_survives_its_file(tmp_path):
    ARM.write(tmp_path / "arm.json")
    assert read_arm(tmp_path / "arm.json") == ARM


def test_driver_relaxes_determinism_only_where_an_operation_has_no_such_form(tmp_path):
    asked = []

    class Bench(run_all.Bench):
        def __init__(self):
            self.lines, self.all_equal = [], True
            self._call, self._work, self._artifacts = Call(1e6), tmp_path, tmp_path

        def _run_side(self, arm, side, folder, watch):
            asked.append((arm.name, arm.recipe.strict_determinism))
            return {"status": "error" if arm.recipe.strict_determinism else "ok"}

        def _keep(self, arm, resident, folder, artifact):
            (tmp_path / "toy-resident").mkdir(exist_ok=True)
            return {"error": "x_kernel does not have a deterministic implementation, but"}

    Bench().run_model("toy", ARM.model, ARM.recipe, ["s2-b1"])
    assert asked == [
        ("toy-selfpair", True),
        ("toy-selfpair", False),
        ("toy-selfpair", False),
        ("toy-streamed-s2-b1", False),
    ]


@pytest.mark.slow
def test_driver_runs_toy_arms_end_to_end(tmp_path):
    options = ["--models", "toy", "--arms", "s2-b1", "--seq-len", "32", "--budget-s", "600"]
    assert run_all.main([*options, "--artifacts", str(tmp_path)]) == 0
    arms = [record["arm"] for _, record in run.read_all(tmp_path)]
    assert sorted(arms) == ["toy-selfpair", "toy-streamed-s2-b1"]

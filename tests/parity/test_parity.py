"""Streamed training gives the bits of resident training, through the public SFTTrainer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.parity.cases import VALUES, Case, pairwise_cases, product_cases
from tests.parity.faults import FAULTS, REPLAY_FAULTS
from tests.parity.side import STEPS

PAIRWISE = pairwise_cases()
# Without checkpointing nothing recomputes, so what a slot held in forward is gone in backward; and
# without poison a fault is a wrong number instead of a loss that is not finite, which stops it.
FAULT_CASE = Case(family="qwen2", checkpointing="off", poison=False)
# Masks, accumulated gradients and random numbers: each has a fault of its own.
REPLAY_FAULT_CASE = Case(family="qwen2", accumulation=2, dropout=0.1, poison=False)
PLANTED = {
    **dict.fromkeys(sorted(FAULTS), FAULT_CASE),
    **dict.fromkeys(sorted(REPLAY_FAULTS), REPLAY_FAULT_CASE),
}


def test_pairwise_cases_cover_every_pair_of_values() -> None:
    for a, b in itertools.combinations(VALUES, 2):
        covered = {(getattr(case, a), getattr(case, b)) for case in PAIRWISE}
        assert covered == set(itertools.product(VALUES[a], VALUES[b])), (a, b)


@pytest.fixture(scope="module")
def pairwise_results(run_sides: Callable[..., Any]) -> list[Any]:
    return run_sides(PAIRWISE, ["resident", "streamed"])


@pytest.mark.parametrize("case", PAIRWISE, ids=lambda case: case.id)
def test_streamed_training_equals_resident_training(
    case: Case, pairwise_results: list[Any]
) -> None:
    resident, streamed = (results[case.id] for results in pairwise_results)
    check_meaningful(resident)
    check_equal(resident, streamed)
    assert streamed["num_blocks"] - case.resident_blocks > case.num_slots
    assert streamed["moved_bytes"] > 0
    check_replayed(case, streamed)


@pytest.mark.slow
def test_streamed_training_equals_resident_training_over_the_whole_product(
    run_sides: Callable[..., Any],
) -> None:
    for batch in _batches(product_cases(), 64):
        resident, streamed = run_sides(batch, ["resident", "streamed"])
        for case in batch:
            check_meaningful(resident[case.id])
            check_equal(resident[case.id], streamed[case.id])


@pytest.fixture(scope="module")
def fault_references(run_sides: Callable[..., Any]) -> Any:
    cases = [FAULT_CASE, REPLAY_FAULT_CASE]
    resident, streamed = run_sides(cases, ["resident", "streamed"])
    for case in cases:
        check_equal(resident[case.id], streamed[case.id])
        check_replayed(case, streamed[case.id])
    return resident


@pytest.mark.parametrize("fault", PLANTED)
def test_parity_notices_when_a_fault_is_planted(
    fault: str, fault_references: Any, run_sides: Callable[..., Any]
) -> None:
    case = PLANTED[fault]
    reference = fault_references[case.id]
    (faulty,) = run_sides([case], ["streamed"], fault=fault)
    differing = [
        (step, name)
        for step, (ours, theirs) in enumerate(
            zip(faulty[case.id]["gradients"], reference["gradients"], strict=True)
        )
        for name in theirs
        if ours[name] != theirs[name]
    ]
    assert differing
    assert faulty[case.id]["adapter"] != reference["adapter"]


ACCELERATE = ("-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu")
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.parametrize("launcher", [ACCELERATE, TWO_RANKS], ids=["accelerate", "two-ranks"])
def test_streamed_training_equals_resident_training_under_a_launcher(
    launcher: tuple[str, ...], run_sides: Callable[..., Any]
) -> None:
    case = Case(family="qwen2", accumulation=2)
    resident, streamed = run_sides([case], ["resident", "streamed"], launcher=launcher)
    check_meaningful(resident[case.id])
    check_equal(resident[case.id], streamed[case.id])
    check_replayed(case, streamed[case.id])


def check_meaningful(result: dict[str, Any]) -> None:
    """Check that the reference has something to be equal to."""
    assert len(result["gradients"]) == STEPS
    assert len(result["gradients"][0]) > 0
    assert result["smallest_gradient_peak"] > 0.0
    assert all(math.isfinite(loss) and loss > 0.0 for loss in result["losses"])
    assert len({frozenset(step.items()) for step in result["gradients"]}) == STEPS


def check_equal(resident: dict[str, Any], streamed: dict[str, Any]) -> None:
    """Check losses, every gradient of every step, and the bytes of the adapter file."""
    for step, (ours, theirs) in enumerate(
        zip(streamed["gradients"], resident["gradients"], strict=True)
    ):
        assert ours.keys() == theirs.keys()
        differing = [name for name in theirs if ours[name] != theirs[name]]
        assert not differing, (step, len(differing), differing[:5])
    assert streamed["losses"] == resident["losses"]
    assert streamed["eval_losses"] == resident["eval_losses"]
    assert streamed["adapter"] == resident["adapter"]


def check_replayed(case: Case, streamed: dict[str, Any]) -> None:
    """Check that layers were replayed, from few records, where and only where they can be."""
    if case.checkpointing == "non-reentrant" and not streamed["fixed_layers"]:
        assert streamed["num_records"] > 0
        # Full and sliding attention, for each place that a layer may have in its block.
        assert 0 < streamed["num_kinds"] <= 2 * case.block_size
    else:
        assert streamed["num_records"] == 0


def _batches(cases: Iterator[Case], count: int) -> Iterator[list[Case]]:
    while batch := list(itertools.islice(cases, count)):
        yield batch

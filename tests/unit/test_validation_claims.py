"""Claims come from samples of publishable artifacts, and tables from claims."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.unit.validation_records import commit_all, make_record
from validation.harness import aggregate, render, repository, run

CLAIM = aggregate.Claim(
    id="step-ms",
    sentence="Step time",
    unit="ms",
    protocol="speed",
    arm="toy-*",
    field="step_ms",
    aggregate="median",
)
TOML = """
[[claim]]
id = "step-ms"
sentence = "Step time"
unit = "ms"
protocol = "speed"
arm = "toy-*"
field = "step_ms"
aggregate = "median"
requires = ["sound"]

[[table]]
name = "speed"
claims = ["step-ms"]
"""
PAGE = "# Page\n\n<!-- poros:table speed -->\nstale\n<!-- /poros:table -->\n\nEnd.\n"


@pytest.fixture
def artifacts(tmp_path):
    """Two runs of one arm, medians 2 and 5."""
    records = [make_record(values=(1.0, 2.0, 9.0)), make_record(values=(5.0, 5.0, 6.0))]
    return [(run.write(record, tmp_path), record) for record in records]


def test_evaluate_recomputes_value_and_spread_from_samples(artifacts):
    record = artifacts[0][1]
    record["summary"]["step_ms"]["median"] = 1e9  # a summary is never read
    value = aggregate.evaluate(CLAIM, artifacts).value
    assert value == {
        "value": 3.5,
        "unit": "ms",
        "artifacts": [path.as_posix() for path, _ in artifacts],
        "repeats": 2,
        "spread": [2.0, 5.0],
        "arm": "toy-a",
    }


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (replace(CLAIM, arm="other-*"), "no publishable artifact"),
        (replace(CLAIM, min_repeats=3), "fewer than 3 runs of toy-a"),
        (replace(CLAIM, requires=("absent",)), "required check failed"),
        (replace(CLAIM, control="toy-selfpair"), "control toy-selfpair: no publishable artifact"),
        (replace(CLAIM, control="toy-a"), "control toy-a is 3.5"),
    ],
)
def test_evaluate_says_why_there_is_no_value(artifacts, claim, reason):
    outcome = aggregate.evaluate(claim, artifacts)
    assert outcome.value is None
    assert reason in outcome.reason


RATIO = replace(CLAIM, arm="toy-a", over="toy-b")


def with_divisor(artifacts, *values, arm="toy-b"):
    record = make_record(arm=arm, values=values)
    return [*artifacts, (run.write(record, artifacts[0][0].parents[2]), record)]


@pytest.mark.parametrize(
    ("floor_ms", "limit_ms"), [(4.0, 8.0), (16.0, 16.0)], ids=["other arm", "own floor"]
)
def test_evaluate_divides_by_the_larger_of_floor_and_other_arm(tmp_path, floor_ms, limit_ms):
    own = make_record(samples=[{"step": 1, "step_ms": 24.0, "floor_ms": floor_ms}])
    other = make_record("toy-b", samples=[{"step": 1, "step_ms": 99.0, "busy_ms": 8.0}])
    claim = replace(RATIO, over_field="busy_ms", floor_field="floor_ms")
    found = [(run.write(record, tmp_path), record) for record in (own, other)]
    value = aggregate.evaluate(claim, found).value
    assert value["value"] == 24.0 / limit_ms
    assert value["arm"] == "toy-a / toy-b"
    assert len(value["artifacts"]) == 2


def test_evaluate_names_the_run_that_lacks_the_field(artifacts):
    outcome = aggregate.evaluate(replace(CLAIM, field="busy_ms"), artifacts)
    assert outcome.value is None
    assert "no busy_ms in" in outcome.reason
    assert artifacts[0][0].name in outcome.reason


def test_evaluate_divides_by_the_arm_that_over_names(artifacts):
    value = aggregate.evaluate(RATIO, with_divisor(artifacts, 7.0, 7.0)).value
    assert value["value"] == 0.5
    assert value["spread"] == [2.0 / 7.0, 5.0 / 7.0]
    assert (value["repeats"], value["arm"]) == (1, "toy-a / toy-b")
    assert len(value["artifacts"]) == 3


@pytest.mark.parametrize(
    ("values", "arm", "reason"),
    [
        ((7.0,), "toy-c", "toy-b: no publishable artifact"),
        ((0.0,), "toy-b", "toy-b is 0"),
    ],
    ids=["missing", "zero"],
)
def test_evaluate_says_why_there_is_no_ratio(artifacts, values, arm, reason):
    outcome = aggregate.evaluate(RATIO, with_divisor(artifacts, *values, arm=arm))
    assert outcome.value is None
    assert reason in outcome.reason


def test_evaluate_scales_to_the_unit_of_the_claim(artifacts):
    value = aggregate.evaluate(replace(CLAIM, scale=1000.0), artifacts).value
    assert value["value"] == 0.0035
    assert value["spread"] == [0.002, 0.005]


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--strict"], 1)])
def test_a_missed_goal_is_shown_and_kept_and_fails_only_when_strict(
    artifacts, arguments, status, monkeypatch, tmp_path, capsys
):
    missed = replace(CLAIM, goal="at_most", target=3.0)
    monkeypatch.setattr(aggregate, "load_claims", lambda: [missed])
    monkeypatch.setattr(aggregate, "sort_out", lambda found: (artifacts, []))
    monkeypatch.setattr(aggregate, "CLAIMS_JSON", tmp_path / "claims.json")
    assert aggregate.main(arguments) == status
    assert "MISSED: step-ms = 3.5 (at most 3; 2 runs)" in capsys.readouterr().out
    assert json.loads((tmp_path / "claims.json").read_text())["step-ms"]["value"] == 3.5


def test_sort_out_keeps_publishable_artifacts_only(artifacts):
    kept, notes = aggregate.sort_out(artifacts)
    assert kept == []
    assert len(notes) == 2
    assert all("unknown" in note for note in notes)


def test_claim_has_no_value_when_a_run_of_its_arms_failed(site):
    commit = repository.read_state(site)["commit"]
    failed = make_record(
        git={"commit": commit, "dirty": False}, status="error", error="x", samples=[]
    )
    run.write(failed, site / "validation" / "artifacts")
    artifacts, notes = aggregate.sort_out(run.read_all(site / "validation" / "artifacts"), site)
    (claim,) = aggregate.load_claims(site / "validation" / "claims.toml")
    outcome = aggregate.evaluate(claim, artifacts, site)
    assert outcome.value is None
    assert "failed" in outcome.reason
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("fields", "value", "reason"),
    [
        ({"checks": {"sound": True, "enough_steps": True}}, 4.0, ""),
        ({"checks": {"sound": True, "enough_steps": False}}, 2.0, ""),
        ({"checks": {"sound": True}}, 2.0, ""),
        ({"samples": [{"step": 1, "other": 1}], "checks": {"enough_steps": True}}, 2.0, ""),
        ({"status": "error", "checks": {"enough_steps": True}}, None, "failed"),
        ({"status": "oom"}, None, "failed"),
    ],
    ids=["enough", "too few", "no such rule", "without the field", "error", "out of memory"],
)
def test_run_that_was_stopped_counts_with_enough_steps_and_voids_nothing(
    site, fields, value, reason
):
    commit = repository.read_state(site)["commit"]
    fields = {"status": "cancelled", "error": "told to stop", **fields}
    stopped = make_record(values=(6.0, 6.0), git={"commit": commit, "dirty": False}, **fields)
    run.write(stopped, site / "validation" / "artifacts")
    artifacts, _ = aggregate.sort_out(run.read_all(site / "validation" / "artifacts"), site)
    assert len(artifacts) == 2, "whatever it showed, it is a row of its table"
    (claim,) = aggregate.load_claims(site / "validation" / "claims.toml")
    outcome = aggregate.evaluate(claim, artifacts, site)
    assert (outcome.value and outcome.value["value"]) == value
    assert reason in outcome.reason


def test_claim_leaves_out_runs_of_older_code(site):
    older = repository.read_state(site)["commit"]
    newer = commit_all(site, "the code that the claim is about")
    artifacts, _ = aggregate.sort_out(run.read_all(site / "validation" / "artifacts"), site)
    (claim,) = aggregate.load_claims(site / "validation" / "claims.toml")
    assert aggregate.evaluate(replace(claim, since=older), artifacts, site).value is not None
    outcome = aggregate.evaluate(replace(claim, since=newer), artifacts, site)
    assert outcome.reason == "no publishable artifact"


@pytest.mark.parametrize(
    ("goal", "value", "reached"),
    [("equal", 0.0, True), ("equal", 0.1, False), ("at_most", 0.1, False), ("at_least", 1.0, True)],
)
def test_goals_compare_value_and_target(goal, value, reached):
    assert aggregate.GOALS[goal](value, 0.0, 0.0) is reached


def test_claims_of_this_repository_name_protocols_that_exist():
    claims = aggregate.load_claims()
    assert claims
    for claim in claims:
        assert (repository.ROOT / "validation" / "protocols" / f"{claim.protocol}.md").exists()
        assert claim.aggregate in aggregate.AGGREGATES
        assert claim.across in aggregate.AGGREGATES
        assert claim.goal in aggregate.GOALS


@pytest.fixture
def site(tmp_path):
    """A repository with one publishable artifact, its claim and a page that shows it."""
    root = tmp_path / "site"
    (root / "validation" / "protocols").mkdir(parents=True)
    (root / "docs").mkdir()
    (root / "validation" / "protocols" / "speed.md").write_text("x")
    (root / "validation" / "claims.toml").write_text(TOML)
    (root / "validation" / "README.md").write_text(
        "<!-- poros:table index -->\n<!-- /poros:table -->\n"
    )
    (root / "docs" / "page.md").write_text(PAGE)
    commit = commit_all(root)
    record = make_record(git={"commit": commit, "dirty": False})
    run.write(record, root / "validation" / "artifacts")
    return root


def fill_claims(root):
    artifacts, _ = aggregate.sort_out(run.read_all(root / "validation" / "artifacts"), root)
    (claim,) = aggregate.load_claims(root / "validation" / "claims.toml")
    value = aggregate.evaluate(claim, artifacts).value
    (root / "validation" / "claims.json").write_text(json.dumps({claim.id: value}))


def test_render_fills_a_block_with_value_and_footer(site):
    fill_claims(site)
    page = site / "docs" / "page.md"
    text = render.render_text(page.read_text(), page, render.load_source(site))
    assert "| Step time | 2 ms | equal 0: MISSED | 2 to 2 | 1 | toy-a |" in text
    assert "Test GPU; 20300101; runs: [1](../validation/artifacts/speed/test-gpu/" in text
    assert text.startswith("# Page\n")
    assert text.endswith("\n\nEnd.\n")
    assert "stale" not in text
    assert render.render_text(text, page, render.load_source(site)) == text


def test_render_says_that_a_claim_has_no_value_yet(site):
    page = site / "validation" / "README.md"
    text = render.render_text(page.read_text(), page, render.load_source(site))
    assert "| `step-ms`: Step time | [speed](protocols/speed.md) | not measured yet |" in text


def test_render_refuses_an_unknown_table(site):
    page = site / "docs" / "page.md"
    with pytest.raises(KeyError, match="other"):
        render.render_text(
            PAGE.replace("table speed", "table other"), page, render.load_source(site)
        )


def test_render_check_fails_on_a_difference_and_writes_nothing(site, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["render", "--check"])
    assert render.main(site) == 1
    assert (site / "docs" / "page.md").read_text() == PAGE
    monkeypatch.setattr("sys.argv", ["render"])
    assert render.main(site) == 0
    monkeypatch.setattr("sys.argv", ["render", "--check"])
    assert render.main(site) == 0
    assert "stale: docs/page.md" in capsys.readouterr().out

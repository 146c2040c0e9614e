"""The harness: what a record must be, that it is written once, and which records count."""

from __future__ import annotations

import copy

import pytest

from tests.unit.validation_records import commit_all, make_record
from validation.harness import repository, run, schema
from validation.harness.classify import classify


@pytest.fixture
def repo(tmp_path):
    """A repository whose second commit brings the protocol; returns (root, first, second)."""
    root = tmp_path / "repo"
    (root / "validation" / "protocols").mkdir(parents=True)
    (root / "file").write_text("x")
    first = commit_all(root)
    (root / "validation" / "protocols" / "speed.md").write_text("asked before the run")
    return root, first, commit_all(root)


def of_commit(commit, *, dirty=False):
    return make_record(git={"commit": commit, "dirty": dirty})


def test_summarise_gives_median_and_range_of_numbers_only():
    samples = [{"a": 1, "flag": True, "name": "x"}, {"a": 4, "b": 2.0}, {"a": 2}]
    assert schema.summarise(samples) == {
        "a": {"median": 2, "min": 1, "max": 4},
        "b": {"median": 2.0, "min": 2.0, "max": 2.0},
    }


def test_problems_finds_none_in_a_valid_record():
    assert schema.problems(make_record()) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"summary": {}}, "summary"),
        ({"status": "fine"}, "status"),
        ({"status": "oom"}, "error"),
        ({"samples": []}, "samples"),
        ({"samples": [{"step_ms": float("nan")}]}, "finite"),
        ({"environment": {}}, "environment"),
        ({"schema": 0}, "schema"),
        ({"extra": 1}, "unknown"),
    ],
)
def test_problems_names_what_is_wrong(change, word):
    assert any(word in problem for problem in schema.problems({**make_record(), **change}))


def test_problems_names_a_missing_key():
    record = make_record()
    del record["git"]
    assert schema.problems(record) == ["missing: git"]


def test_write_counts_repeats_and_never_overwrites(tmp_path):
    record = make_record()
    paths = [run.write(record, tmp_path) for _ in range(2)]
    assert [path.name for path in paths] == [
        "20300101T000000Z-toy-a-0000000-r1.json",
        "20300101T000000Z-toy-a-0000000-r2.json",
    ]
    assert paths[0].parent == tmp_path / "speed" / "test-gpu"
    before = paths[0].read_text()
    paths[1].unlink()
    other = run.write(make_record(arm="a"), tmp_path)
    assert other.name.endswith("-a-0000000-r1.json")
    assert paths[0].read_text() == before


def test_write_refuses_an_invalid_record(tmp_path):
    with pytest.raises(ValueError, match="summary"):
        run.write({**make_record(), "summary": {}}, tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_read_all_returns_what_was_written(tmp_path):
    record = make_record()
    path = run.write(record, tmp_path)
    assert list(run.read_all(tmp_path)) == [(path, record)]


def test_read_state_sees_commit_and_dirt(repo):
    root, _, second = repo
    assert repository.read_state(root) == {"commit": second, "dirty": False}
    (root / "file").write_text("changed")
    assert repository.read_state(root)["dirty"]


def test_artifacts_that_a_run_leaves_make_the_tree_no_other(repo):
    root, _, second = repo
    folder = root / "validation" / "artifacts" / "speed"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    assert repository.read_state(root) == {"commit": second, "dirty": False}
    (root / "validation" / "new.py").write_text("x")
    assert repository.read_state(root)["dirty"]


def test_read_state_takes_the_callers_word_for_a_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("POROS_GIT_COMMIT", "a" * 40)
    assert repository.read_state(tmp_path) == {"commit": "a" * 40, "dirty": True}
    monkeypatch.setenv("POROS_GIT_DIRTY", "0")
    assert repository.read_state(tmp_path) == {"commit": "a" * 40, "dirty": False}


def test_classify_accepts_a_clean_run_of_a_commit_with_the_protocol(repo):
    root, _, second = repo
    assert classify(of_commit(second), root=root).kind == "publishable"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda first, second: of_commit(second, dirty=True), "dirty"),
        (lambda first, second: of_commit(first), "younger"),
        (lambda first, second: of_commit("f" * 40), "unknown"),
        (
            lambda first, second: make_record(
                status="oom", error="x", git={"commit": second, "dirty": False}
            ),
            "oom",
        ),
    ],
)
def test_classify_calls_the_rest_debug(repo, make, reason):
    root, first, second = repo
    verdict = classify(make(first, second), root=root)
    assert verdict.kind == "debug"
    assert reason in verdict.reasons[0]


def test_classify_calls_a_touched_artifact_invalid(repo, tmp_path):
    root, _, second = repo
    record = of_commit(second)
    path = run.write(record, tmp_path)
    assert classify(record, path, root).kind == "publishable"
    touched = copy.deepcopy(record)
    touched["samples"][0]["step_ms"] = 0.5
    assert classify(touched, path, root).kind == "invalid"
    assert classify({**record, "arm": "other"}, path, root).kind == "invalid"

"""The record of the GPU suite says of every test how it ended."""

from validation.experiments.gpu_suite.run import read_samples

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.a" name="passes" time="0.5"/>
<testcase classname="tests.gpu.a" name="fails" time="1.25"><failure message="x"/></testcase>
<testcase classname="tests.gpu.b" name="skips" time="0"><skipped message="x"/></testcase>
</testsuite></testsuites>"""


def test_read_samples_counts_a_failure_and_a_skip_as_failed(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    samples = read_samples(report)
    assert [sample["outcome"] for sample in samples] == ["passed", "failure", "skipped"]
    assert [sample["failed"] for sample in samples] == [0, 1, 1]
    assert samples[1]["test"] == "tests.gpu.a::fails"
    assert samples[1]["seconds"] == 1.25

"""Import is cheap, the public names are there, and the command runs on a bare machine.

Everything runs in a process of its own: this one has imported far too much already.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import poros_hf
from tests.tiny import tiny_config

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from poros_hf.cli.main import main; sys.exit(main(sys.argv[1:]))"
NO_BITSANDBYTES = """
import sys
sys.modules["bitsandbytes"] = None  # what imports it, or looks for it, finds none
"""
NO_PROC = """
import builtins, io, os

def refuse(function):
    def guarded(path, *args, **kwargs):
        if str(path).startswith("/proc"):
            raise PermissionError(13, "Permission denied", str(path))
        return function(path, *args, **kwargs)
    return guarded

builtins.open = io.open = refuse(io.open)
os.listdir, os.scandir, os.stat = refuse(os.listdir), refuse(os.scandir), refuse(os.stat)
"""
NO_CUDA = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
"""
BARE = {
    "no bitsandbytes": NO_BITSANDBYTES,
    "no proc": NO_PROC,
    "none of them": NO_CUDA + NO_BITSANDBYTES + NO_PROC,
}

on_bare_machines = pytest.mark.parametrize("hidden", BARE.values(), ids=BARE)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )


def output(code: str, *arguments: str) -> str:
    result = python(code, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    return set(output(code).split())


def test_import_brings_in_no_heavy_package():
    heavy = {"torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets"}
    assert not modules_after("import poros_hf") & heavy


def test_config_brings_in_no_heavy_package():
    heavy = {"torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets"}
    assert not modules_after("import poros_hf.config") & heavy


def test_streamer_brings_in_neither_bitsandbytes_nor_transformers():
    assert not modules_after("import poros_hf.streamer") & {"bitsandbytes", "transformers"}


def test_public_names_do_not_bring_in_trl():
    assert "trl" not in modules_after("from poros_hf import *")


@pytest.mark.parametrize("statement", ["import poros_hf", "from poros_hf import *"])
def test_import_does_not_initialise_cuda(statement):
    code = f"{statement}\nimport torch; print(torch.cuda.is_initialized())"
    assert output(code).split() == ["False"]


def test_all_names_resolve():
    code = "import poros_hf; print(*[n for n in poros_hf.__all__ if getattr(poros_hf, n) is None])"
    assert output(code).split() == []


def test_dir_lists_all_names():
    assert set(poros_hf.__all__) <= set(dir(poros_hf))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = poros_hf.nothing


def test_public_names_register_the_quantizer():
    code = (
        "from poros_hf import PorosConfig\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
        "print(PorosConfig.quant_method in AUTO_QUANTIZER_MAPPING)"
    )
    assert output(code).split() == ["True"]


def test_version_is_that_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert poros_hf.__version__ == project["version"]


def test_package_says_that_it_is_typed():
    assert (Path(poros_hf.__file__).parent / "py.typed").is_file()


@on_bare_machines
def test_import_works(hidden):
    assert output(f"{hidden}\nimport poros_hf; print(poros_hf.__version__)").split()


@on_bare_machines
def test_config_can_be_made(hidden):
    code = f"{hidden}\nfrom poros_hf import PorosConfig; print(PorosConfig(num_slots=3).num_slots)"
    assert output(code).split() == ["3"]


@on_bare_machines
def test_poros_version_prints_the_version(hidden):
    assert output(f"{hidden}\n{MAIN}", "--version").split() == ["poros", poros_hf.__version__]


@pytest.mark.parametrize("name", BARE)
def test_poros_doctor_goes_through_on_a_bare_machine(name):
    result = python(f"{BARE[name]}\n{MAIN}", "doctor")
    has_bitsandbytes = name == "no proc"
    assert result.returncode == (0 if has_bitsandbytes else 1), result.stderr
    lines = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert len(lines) == 12
    assert "the check failed" not in result.stdout
    assert ("pip install 'bitsandbytes" in result.stdout) is not has_bitsandbytes


def test_poros_doctor_reports_memory_when_proc_is_hidden():
    report = json.loads(python(f"{NO_PROC}\n{MAIN}", "doctor", "--json").stdout)
    memory = report["memory"]
    assert 0 < memory["available_bytes"] <= memory["total_bytes"]


def test_poros_doctor_prints_one_json_object_without_cuda():
    report = json.loads(output(f"{NO_CUDA}\n{MAIN}", "doctor", "--json"))
    assert report["gpu"] is None
    assert {"platform", "memory", "versions", "findings"} <= set(report)
    assert report["versions"]["poros-hf"] == poros_hf.__version__


@on_bare_machines
def test_poros_plan_works_on_a_bare_machine(hidden, tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    words = ("plan", "-m", str(tmp_path), "--vram", "8GiB", "--json")
    assert json.loads(output(f"{hidden}\n{MAIN}", *words))["fits"]


def test_poros_lists_its_commands_when_asked_for_help():
    assert "doctor" in output(MAIN, "--help")


@pytest.mark.parametrize("arguments", [(), ("no-such-command",), ("doctor", "--no-such-option")])
def test_poros_ends_with_status_two_when_it_is_called_wrongly(arguments):
    result = python(MAIN, *arguments)
    assert result.returncode == 2
    assert "usage: poros" in result.stderr
    assert "Traceback" not in result.stderr


def test_poros_is_installed_as_a_command():
    command = Path(sys.executable).parent / "poros"
    result = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["poros", poros_hf.__version__]

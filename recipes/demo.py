"""Fine-tune the real SmolLM2 twice, streamed and resident, and compare: this is `make demo`.

The streamed run is `sft_smollm2.py` as it stands. The resident run is the same script with
`--resident`: stock bitsandbytes under stock TRL, in a process of its own that never imports
poros_hf. Each run writes its adapter and a run.json; the report is computed from these files.
The exit status is 0 only if the held-out loss fell clearly and the two adapters do not differ.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

RECIPES = Path(__file__).parent
MODEL = Path("models/smollm2-135m-instruct")
CLEAR_FALL = 0.9  # the held-out loss must end below this share of where it began

# Quiet and offline. Deterministic kernels need the workspace setting on a GPU. Threads that wait
# without spinning keep a CPU run from crawling when something else is using the cores.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "OMP_WAIT_POLICY": "PASSIVE",
}


@dataclass(frozen=True)
class AdapterComparison:
    """How two adapter files differ."""

    num_tensors: int
    num_trained: int  # lora_B tensors that left zero; untouched adapters would be equal for nothing
    num_lora_b: int
    largest_difference: float

    @property
    def is_equal(self) -> bool:
        """Whether the comparison means something and found no difference."""
        return self.largest_difference == 0 and 0 < self.num_trained == self.num_lora_b


def compare_adapters(first: Path, second: Path) -> AdapterComparison:
    """Compare every tensor of two adapter folders.

    NaN counts as a difference, and so does another set of names or shapes.
    """
    left, right = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    lora_b = [tensor for name, tensor in left.items() if ".lora_B." in name]
    if {name: t.shape for name, t in left.items()} != {name: t.shape for name, t in right.items()}:
        largest = math.inf
    else:
        differences = [float((left[n].double() - right[n].double()).abs().max()) for n in left]
        largest = math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)
    return AdapterComparison(
        num_tensors=len(left),
        num_trained=sum(bool(tensor.any()) for tensor in lora_b),
        num_lora_b=len(lora_b),
        largest_difference=largest,
    )


def failures(
    streamed: dict[str, Any], resident: dict[str, Any], adapters: AdapterComparison
) -> list[str]:
    """List what the two runs should have shown and did not."""
    checks = {
        "the held-out loss did not fall clearly": (
            streamed["loss_after"] < CLEAR_FALL * streamed["loss_before"]
        ),
        "the adapters are not equal": adapters.is_equal,
        "the held-out losses of the two runs differ": all(
            streamed[key] == resident[key] for key in ("loss_before", "loss_after")
        ),
        "the streamed run did not use poros_hf": streamed["imported_poros_hf"],
        "the resident run imported poros_hf": not resident["imported_poros_hf"],
    }
    return [problem for problem, is_fine in checks.items() if not is_fine]


def report(streamed: dict[str, Any], resident: dict[str, Any], adapters: AdapterComparison) -> str:
    """Lay out the numbers of both runs; MB is 1e6 bytes."""
    moved = streamed["streaming"]
    lines = [
        f"held-out loss    {streamed['loss_before']:.4f} before, {streamed['loss_after']:.4f} after"
        f" {moved['steps']} steps",
        f"host store       {moved['store_bytes'] / 1e6:.1f} MB of packed weights"
        f" in {moved['num_blocks']} blocks",
        f"device slots     {moved['slot_bytes'] / 1e6:.1f} MB in {moved['num_slots']} slots",
        f"moved per step   {moved['moved_bytes_per_step'] / 1e6:.1f} MB, host to device only",
    ]
    if "device_peak_bytes" in streamed:
        lines.append(
            f"device peak      {streamed['device_peak_bytes'] / 1e6:.1f} MB streamed,"
            f" {resident['device_peak_bytes'] / 1e6:.1f} MB resident"
        )
    lines += [
        "parity           largest difference of any adapter tensor:"
        f" {adapters.largest_difference:g} ({adapters.num_tensors} tensors, resident run without"
        " poros_hf)",
        "",
        "prompt           " + indented(streamed["arguments"]["prompt"]),
        "answer before    " + indented(streamed["answer_before"]),
        "answer after     " + indented(streamed["answer_after"]),
    ]
    return "\n".join(lines)


def indented(text: str) -> str:
    """Show a text of several lines in the second column of the report."""
    return text.strip("\n").replace("\n", "\n" + " " * 17)


def run(title: str, script: str, *arguments: str) -> None:
    """Run one recipe with this interpreter; its progress goes straight to the terminal."""
    print(f"\n== {title}", flush=True)
    command = [sys.executable, str(RECIPES / script), *arguments]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="made first if it is missing")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"))
    args, more = parser.parse_known_args()  # the rest goes to both runs, for example --max_steps 8
    folders = {side: args.output / side for side in ("streamed", "resident")}
    run("Model: SmolLM2-135M-Instruct", "make_smollm2.py", str(args.model))
    for side, flags in (("streamed", []), ("resident", ["--resident"])):
        same = ["--model", str(args.model), "--deterministic", *more]
        run(
            f"Training, {side}", "sft_smollm2.py", "--output_dir", str(folders[side]), *same, *flags
        )
    streamed, resident = (
        json.loads((folder / "run.json").read_text()) for folder in folders.values()
    )
    adapters = compare_adapters(folders["streamed"], folders["resident"])
    print(f"\n== Report\n{report(streamed, resident, adapters)}")
    problems = failures(streamed, resident, adapters)
    for problem in problems:
        print(f"FAILED: {problem}")
    return len(problems)


if __name__ == "__main__":
    sys.exit(main())

"""Run one system in this process at every length, and leave what was seen.

python -m validation.peers.side JOB.json RESULT.json
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from validation.experiments.parity.recorder import graph_pool_bytes, memory_bytes
from validation.experiments.timeline.record import StepProfiler
from validation.harness import repository
from validation.harness.partial import PartialResult
from validation.peers.contenders import CONTENDERS, PACKAGES, Checkpoints, Contender


def hash_gradients(gradients: dict[str, torch.Tensor]) -> dict[str, str]:
    """Hash every gradient by a name that no wrapper changes; zero gradients are refused.

    Raises:
        ValueError: A gradient is zero throughout or not finite.
    """
    hashes = {}
    for name, value in gradients.items():
        if not torch.isfinite(value).all() or not value.any():
            raise ValueError(f"gradient of {name} is zero or not finite")
        plain = name[name.index("layers.") :].replace("._inner", "").replace(".layer.", ".")
        hashes[plain] = hashlib.sha256(
            value.contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
    return hashes


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_length(
    contender: Contender, seq_len: int, vocab_size: int, counts: tuple[int, int], end: float
) -> Iterator[dict[str, Any]]:
    """Make warm-up, timed and one profiled step of rows of `seq_len`; yield a sample of each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(seq_len)
    num_warmup, num_timed = counts
    for number in range(num_warmup + num_timed + 1):
        if time.time() > end:
            break
        ids = torch.randint(4, vocab_size, (1, seq_len), generator=generator).to(device)
        profiler = StepProfiler() if number == num_warmup + num_timed else None
        if profiler is not None:
            profiler.start()
        synchronise()
        begin = time.perf_counter()
        loss = contender.step(ids)
        synchronise()
        name = "warmup_step_ms" if number < num_warmup else "step_ms"
        sample = {"step": number + 1, "loss": loss}
        if profiler is None:
            sample[name] = 1e3 * (time.perf_counter() - begin)
        else:
            sample |= profiler.stop().figures()
        yield sample | memory_bytes() | {"graph_pool_bytes": graph_pool_bytes()}


def run_job(job: dict[str, Any], result: Path) -> dict[str, Any]:
    """Run a system and leave its result; one that fails is a result as well."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folders = {key: Path(job[key]) for key in ("nf4", "bf16", "work")}
    status: dict[str, Any] = {"status": "ok", "error": None}
    seen: dict[str, Any] = {"lengths": {}, "gradients": {}}

    def look() -> dict[str, Any]:
        version = _version(job["name"])
        return {**seen, "imports_poros_hf": "poros_hf" in sys.modules, "version": version}

    kept = PartialResult(result, look)
    try:
        contender = CONTENDERS[job["name"]](Checkpoints(device=device, **folders))
        vocab_size = json.loads((folders["nf4"] / "config.json").read_text())["vocab_size"]
        contender.keep_gradients = True
        contender.step(torch.arange(4, 4 + job["lengths"][0])[None].to(device) % vocab_size)
        seen["gradients"] = hash_gradients(contender.gradients)
        contender.keep_gradients, contender.gradients = False, {}
        for seq_len in job["lengths"]:
            counts = (job["num_warmup"], job["num_timed"])
            samples = seen["lengths"][str(seq_len)] = []
            for sample in run_length(contender, seq_len, vocab_size, counts, job["end"]):
                samples.append(sample)
                kept.tick()
    except Exception as error:  # noqa: BLE001 # a failed run is kept as an artifact
        is_oom = isinstance(error, torch.cuda.OutOfMemoryError)
        text = traceback.format_exc()
        for folder in sorted({str(repository.ROOT), *filter(None, sys.path)}, key=len)[::-1]:
            text = text.replace(f"{folder}/", "")
        status = {"status": "oom" if is_oom else "error", "error": text}
    found = {**look(), **status}
    kept.finish(found)
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(PACKAGES.get(name, "transformers"))
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    found = run_job(json.loads(options.job.read_text()), options.result)
    if found["error"] is not None:
        print(found["error"], file=sys.stderr)
    return 0 if found["status"] == "ok" else 1


if __name__ == "__main__":
    raise SystemExit(main())

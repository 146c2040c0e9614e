"""Load checkpoints as they are in fresh processes, streamed and standard, and train on them.

    python -m validation.experiments.streamed_load.run --plan h200 --budget-s 340

Every arm writes two records: one of the protocol streamed-load, about rate and device memory while
loading, and one of rss, about host memory over load and training. An arm's name says what it is:
shape, source (bf16 or nf4), decoder layers where not all, `shm` where its checkpoint is in memory,
strategy. `--work DIR` keeps checkpoints for the next call of this or another experiment: those in
memory where DIR is in /dev/shm, and else those on a disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from validation.experiments.parity.checkpoints import (
    LOADING_S,
    find_or_make,
    folder_of,
    is_made,
    making_s,
)
from validation.experiments.parity.run_all import describe_machine
from validation.experiments.parity.shapes import SHAPES, qwen_config
from validation.experiments.streamed_load.disk import evict, is_in_memory, read_rate_gbps
from validation.experiments.streamed_load.quantisers import SHAPES as WEIGHTS
from validation.experiments.streamed_load.quantisers import compare
from validation.experiments.streamed_load.side import Job
from validation.harness import run, schema
from validation.harness.call import Call, Result

_NAME = re.compile(
    r"(?P<shape>\w+)-(?P<source>bf16|nf4)(-l(?P<layers>\d+))?(?P<shm>-shm)?-(?P<strategy>\w+)"
)
_SPARE_BYTES = 10**9
_DISK_BYTES = 6 * 10**9
_MOST_CACHED = 0.01
_STEPS_S = 10.0  # behind loading; no arm begins with less
_QUANTISERS_S = 10.0
PROTOCOLS = ("streamed-load", "rss")
# Ordered so that a checkpoint is used by all its arms and then deleted.
PLANS: Mapping[str, tuple[str, ...]] = {
    "h200": (
        "32b-bf16-streamed",
        "32b-bf16-standard",
        "72b-nf4-shm-streamed",
        "72b-nf4-shm-standard",
        "7b-bf16-shm-streamed",
        "32b-nf4-l1-shm-streamed",
    ),
    "toy": ("toy-bf16-streamed", "toy-bf16-standard", "toy-nf4-streamed", "toy-nf4-standard"),
}


@dataclass(frozen=True, kw_only=True)
class LoadArm:
    """One load.

    Attributes:
        source: What is on the disk: bf16 is quantised while it is loaded, nf4 is read as it is.
        layers: Decoder layers; None is all of the shape.
        in_memory: The checkpoint is in /dev/shm, which is no disk.
        strategy: `nf4_load_strategy`.
    """

    shape: str
    source: str
    layers: int | None
    in_memory: bool
    strategy: str

    @classmethod
    def parse(cls, name: str) -> LoadArm:
        """Read an arm's name.

        Raises:
            ValueError: It is none.
        """
        match = _NAME.fullmatch(name)
        if match is None or match["shape"] not in SHAPES:
            raise ValueError(f"{name!r} is no arm: SHAPE-SOURCE[-lLAYERS][-shm]-STRATEGY")
        layers = int(match["layers"]) if match["layers"] else None
        return cls(
            shape=match["shape"],
            source=match["source"],
            layers=layers,
            in_memory=match["shm"] is not None,
            strategy=match["strategy"],
        )

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint, which arms share."""
        layers = f"-l{self.layers}" if self.layers else ""
        return f"{self.shape}-{self.source}{layers}{'-shm' if self.in_memory else ''}"

    @property
    def name(self) -> str:
        """Name of the arm."""
        return f"{self.checkpoint}-{self.strategy}"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all arms share."""

    call: Call
    machine: Mapping[str, Any]
    artifacts: Path
    num_steps: int
    seq_len: int

    def run_arm(self, arm: LoadArm, model: Path) -> list[schema.Record]:
        """Drop the caches, measure the disk, load in a fresh process, write both records."""
        shards = sorted(model.glob("*.safetensors"))
        total = sum(path.stat().st_size for path in shards)
        on_disk = not is_in_memory(model)
        disk_gbps = read_rate_gbps(shards, _DISK_BYTES) if on_disk else None
        cached = evict(shards)
        disk = {"on_disk": on_disk, "caches_dropped": cached <= _MOST_CACHED * total}
        started = run.utc_stamp()
        files = {protocol: run.ArtifactFile(self.artifacts) for protocol in PROTOCOLS}

        def keep(result: Result) -> list[schema.Record]:
            checks = {**disk, **make_checks(arm, result, self.num_steps)}
            stamped = {**result, "started": started}
            records = [self._make_record(arm, name, model, stamped, checks) for name in files]
            for artifact, record in zip(files.values(), records, strict=True):
                artifact.write(record)
            return records

        with tempfile.TemporaryDirectory(prefix="side-", dir=model.parent) as work:
            job = Job(
                model=str(model),
                work=work,
                strategy=arm.strategy,
                num_steps=self.num_steps,
                seq_len=self.seq_len,
                disk_gbps=disk_gbps,
            )
            records = keep(self._run_side(job, keep))
        for record in records:
            self.call.say(report(record))
        return records

    def _run_side(self, job: Job, keep: Callable[[Result], Any]) -> Result:
        job_path, result_path = (Path(job.work) / name for name in ("job.json", "result.json"))
        job_path.write_text(json.dumps(asdict(job)))
        program = "validation.experiments.streamed_load.side"
        return self.call.run_side(
            ["-m", program, str(job_path), str(result_path)],
            result_path,
            empty={"load": {}, "losses": [], "samples": [], "log": []},
            watch=keep,
            env={"HF_HUB_OFFLINE": "1"},
        )

    def _make_record(
        self,
        arm: LoadArm,
        protocol: str,
        model: Path,
        result: Mapping[str, Any],
        checks: Mapping[str, bool],
    ) -> schema.Record:
        samples, is_whole = list(result["samples"]), checks["trained"]
        if protocol == "streamed-load":
            samples = [{**result["load"]}] if result["load"] else []
            is_whole = bool(samples)
        return run.make_record(
            {
                "id": protocol,
                "arm": arm.name,
                "status": result["status"],
                "error": result["error"],
                "started": result["started"],
                "command": ["python", "-m", "validation.experiments.streamed_load.side"],
                "environment": dict(self.machine),
                "config": {
                    **asdict(arm),
                    "num_steps": self.num_steps,
                    "seq_len": self.seq_len,
                    "store": result.get("store"),
                    "log": result["log"],
                },
                "model": describe_checkpoint(model, arm),
                "data": {"id": "random ids, seed 0", "sha256": ""},
                "checks": {**checks, "enough_steps": is_whole},
                "samples": samples,
            }
        )

    def run_quantisers(self) -> schema.Record:
        """Compare CPU and GPU quantisation, and write that record."""
        device = torch.device("cuda" if self.machine["gpu"] else "cpu")
        started = run.utc_stamp()
        record = run.make_record(
            {
                "id": "streamed-load",
                "arm": "quantisers",
                "status": "ok",
                "started": started,
                "command": ["python", "-m", "validation.experiments.streamed_load.run"],
                "environment": dict(self.machine),
                "config": {"weights": [list(shape) for shape in WEIGHTS], "seed": 0},
                "model": {"id": "random weights, seed 0", "sha256": ""},
                "data": {"id": "none", "sha256": ""},
                "checks": {"has_gpu": self.machine["gpu"] is not None},
                "samples": [compare(shape, device) for shape in WEIGHTS],
            }
        )
        run.write(record, self.artifacts)
        self.call.say(report(record))
        return record


def make_checks(arm: LoadArm, result: Mapping[str, Any], num_steps: int) -> dict[str, bool]:
    """Return the conditions that claims require of a run."""
    word = "streamed reader" if arm.strategy == "streamed" else "transformers' own reader"
    losses = result["losses"]
    return {
        "as_named": any(word in line for line in result["log"]),
        "trained": len(losses) == num_steps and all(0.0 < loss < 1e4 for loss in losses),
        "pinned": bool(result.get("store", {}).get("is_pinned")),
    }


def describe_checkpoint(model: Path, arm: LoadArm) -> dict[str, str]:
    """Return identity and hash: of the index, because the weights follow from shape and seed."""
    index = (model / "model.safetensors.index.json").read_bytes()
    identity = f"qwen2.5 {arm.checkpoint}, random weights, seed 0"
    return {"id": identity, "sha256": hashlib.sha256(index).hexdigest()}


def checkpoint_bytes(arm: LoadArm) -> int:
    """Return about what an arm's checkpoint takes: two bytes a weight, or half of one and scales.

    Embedding and head have two in either.
    """
    config = qwen_config(arm.shape, arm.layers)
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner
    per_weight = 2.0 if arm.source == "bf16" else 0.52
    decoder = config.num_hidden_layers * layer * per_weight
    return int(decoder + 4 * config.vocab_size * hidden)


def check_room(arm: LoadArm, folder: Path) -> None:
    """Refuse an arm whose checkpoint has no room.

    Raises:
        OSError: There is no room for it.
    """
    needed, free = checkpoint_bytes(arm) + _SPARE_BYTES, shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{arm.checkpoint} needs {needed / 1e9:.1f} GB in {folder}, free are {free / 1e9:.1f}: "
            "name an arm with fewer layers for the rate, and one with -shm for memory"
        )


def run_arms(names: Sequence[str], bench: Bench, work: Path | None) -> Iterator[schema.Record]:
    """Run arms in order; each checkpoint is written once and, but in `work`, deleted at the end."""
    arms = [LoadArm.parse(name) for name in names]
    for checkpoint in dict.fromkeys(arm.checkpoint for arm in arms):
        own = [arm for arm in arms if arm.checkpoint == checkpoint]
        in_memory = own[0].in_memory
        if work is not None and is_in_memory(work) == in_memory:
            yield from run_own(own, bench, work)
        else:
            parent = "/dev/shm" if in_memory else None
            with tempfile.TemporaryDirectory(prefix="load-", dir=parent) as folder:
                yield from run_own(own, bench, Path(folder))


def run_own(arms: Sequence[LoadArm], bench: Bench, folder: Path) -> Iterator[schema.Record]:
    """Run the arms of one checkpoint, which is in the folder or is made there."""
    first, call = arms[0], bench.call
    in_16_bits = first.source == "bf16"
    path = folder_of(folder, first.shape, first.layers, in_16_bits=in_16_bits)
    least_s = LOADING_S[first.shape] * (1 if first.in_memory else 2) + _STEPS_S
    if not is_made(path):
        needed_s = making_s(first.shape, first.layers, in_16_bits=in_16_bits) + least_s
        if not call.has_time(", ".join(arm.name for arm in arms), needed_s):
            return
        check_room(first, folder)
    model = find_or_make(call, folder, first.shape, first.layers, in_16_bits=in_16_bits)
    for arm in arms:
        if model is not None and call.has_time(arm.name, least_s):
            yield from bench.run_arm(arm, model)


def report(record: schema.Record) -> str:
    """Return one line about a record."""
    wanted = ("load_gbps", "load_over_disk", "load_peak_allocated_bytes", "peak_host_bytes")
    figures = [
        f"{name} {record['summary'][name]['max']:.4g}"
        for name in wanted
        if name in record["summary"]
    ]
    failed = [name for name, passed in record["checks"].items() if not passed]
    return (
        f"{record['id']} {record['arm']}: {record['status']}, {', '.join(figures)}"
        f"{', NOT ' + ', '.join(failed) if failed else ''}"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=PLANS, default="h200")
    parser.add_argument("--arms", nargs="+", help="in place of the plan's")
    parser.add_argument("--num-steps", type=int, default=3, help="optimizer steps behind a load")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--budget-s", type=float, default=340.0)
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    parser.add_argument("--work", type=Path, help="where checkpoints are kept between calls")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the arms; 0 where each is ok."""
    options = parse(arguments)
    names = options.arms or PLANS[options.plan]
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    with Call(options.budget_s) as call:
        bench = Bench(
            call=call,
            machine=describe_machine(),
            artifacts=options.artifacts,
            num_steps=options.num_steps,
            seq_len=options.seq_len,
        )
        records = []
        if call.has_time("quantisers", _QUANTISERS_S):
            records.append(bench.run_quantisers())
        records += run_arms(names, bench, options.work)
    print(*map(report, records), sep="\n")
    return 0 if all(record["status"] == "ok" for record in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())

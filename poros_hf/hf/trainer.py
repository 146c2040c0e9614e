"""PorosTrainer: three lines from a model's name to a trained adapter, on TRL's SFTTrainer."""

from __future__ import annotations

import inspect
import math
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoTokenizer, set_seed

from poros_hf.config import PorosConfig, refuse_unknown
from poros_hf.errors import ConfigError
from poros_hf.hf.adapter_file import check_saved_adapter
from poros_hf.hf.adapter_repo import refuse_adapter_as_base
from poros_hf.hf.adapter_shape import count_adapter_weights
from poros_hf.hf.callback import PorosStreaming
from poros_hf.hf.checkpoints import check_resumable, pick_checkpoint
from poros_hf.hf.loader import from_pretrained, read_config
from poros_hf.hf.model_config import refuse_missing_folder
from poros_hf.hf.session import explained_training
from poros_hf.hf.weight_files import check_local_files
from poros_hf.hub import Repository


class PorosTrainer:
    """Fine-tune a LoRA adapter on a streamed base, with SFTTrainer's defaults spelled out.

        trainer = PorosTrainer.from_pretrained("Qwen/Qwen2.5-32B", block_size=4)
        trainer.train("OpenAssistant/oasst1", steps=200, seq_len=512)
        trainer.save("./poros_output/qwen32b-lora")

    Made by `from_pretrained`. Whoever needs more than its arguments uses SFTTrainer itself, with
    PorosStreaming: nothing here trains on its own.

    Attributes:
        config: How the base is quantised and streamed.
        lora: The adapter's LoraConfig.
        tokenizer: Of the base.
    """

    def __init__(
        self,
        model_id: str,
        *,
        config: PorosConfig,
        lora: LoraConfig,
        tokenizer: Any,
        location: dict[str, Any],
    ) -> None:
        self.config = config
        self.lora = lora
        self.tokenizer = tokenizer
        self._model_id = model_id
        self._location = location
        self._model: Any = None
        self._is_writer = True

    @classmethod
    def from_pretrained(  # noqa: PLR0913 # every default is visible here
        cls,
        model_id: str | Path,
        *,
        lora_rank: int = 16,
        lora_alpha: int = 32,
        lora_dropout: float = 0.0,
        target_modules: str | list[str] = "all-linear",
        exclude_modules: str | list[str] | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        trust_remote_code: bool = False,
        **config_fields: Any,
    ) -> PorosTrainer:
        """Read config and tokenizer of a base model, and check what is asked.

        Weights are read when they are first needed, by `train`, behind the check of the rows.

        Args:
            model_id: Folder, or repository on the Hub; 16-bit, or 4-bit already.
            lora_rank: Rank of the adapters, 1 or more.
            lora_alpha: Their scale is lora_alpha / lora_rank.
            lora_dropout: Share of the adapters' inputs that is dropped while training, 0 to 1.
            target_modules: Names of linear layers; "all-linear" is all but the output head.
            exclude_modules: Names of layers to leave out, or a pattern of whole names: towers of
                multimodal models, above all.
            revision: Branch, tag or commit of the repository.
            token: Access token; None takes the one that `hf auth login` stored.
            trust_remote_code: Whether code from the repository may run.
            **config_fields: Fields of PorosConfig by name, for example `block_size=4`.

        Raises:
            ConfigError: A name is unknown (the nearest one is named), or a value out of range.
            CheckpointError: The checkpoint is quantised in another format.
            UnsupportedModelError: The adapter would lie on a vision tower.
        """
        refuse_unknown(config_fields, _known_keywords(cls.from_pretrained))
        config = PorosConfig.from_dict(config_fields)
        _check_range("lora_rank", lora_rank, 1)
        _check_range("lora_alpha", lora_alpha, 1)
        _check_share("lora_dropout", lora_dropout, 1.0)
        name = str(model_id)
        location = {"revision": revision, "token": token, "trust_remote_code": trust_remote_code}
        source = Repository(name=name, revision=revision, token=token)
        refuse_missing_folder(name)
        refuse_adapter_as_base(source)
        model_config = read_config(name, config, **location)
        check_local_files(source, model_config)
        lora = LoraConfig(
            r=lora_rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            target_modules=target_modules,
            exclude_modules=exclude_modules,
            task_type="CAUSAL_LM",
        )
        count_adapter_weights(model_config, lora)
        tokenizer = AutoTokenizer.from_pretrained(name, **location)
        return cls(name, config=config, lora=lora, tokenizer=tokenizer, location=location)

    @property
    def model(self) -> Any:
        """The streamed base, with the adapter once it has been trained; loaded if need be."""
        if self._model is None:
            self._model = from_pretrained(self._model_id, self.config, **self._location)
        return self._model

    def train(  # noqa: PLR0913 # every default is visible here
        self,
        dataset: Any,
        *,
        steps: int = 200,
        seq_len: int = 512,
        batch_size: int = 1,
        accumulation: int = 4,
        learning_rate: float = 1e-4,
        lr_scheduler: str = "cosine",
        warmup_steps: int = 5,
        packing: bool = False,
        split: str = "train",
        language: str = "en",
        logging_steps: int = 5,
        save_steps: int = 100,
        keep_checkpoints: int = 2,
        output_dir: str | Path = "poros_output",
        resume: bool | str | Path = False,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Train the adapter, a new one the first time and the same one from then on.

        Rows and checkpoint are checked before weights are read. What is not named here is as
        SFTConfig has it; gradient checkpointing is on.

        Args:
            dataset: Data set on the Hub, jsonl, json, csv or parquet file, folder, or an object of
                datasets; OpenAssistant's message trees become conversations.
            steps: Optimizer steps in all, those before a resumed checkpoint included.
            seq_len: Tokens per row; longer rows are cut.
            batch_size: Rows per device and forward pass.
            accumulation: Forward passes per optimizer step.
            learning_rate: Peak of the schedule.
            lr_scheduler: Name of transformers' schedule.
            warmup_steps: Optimizer steps up to the peak.
            packing: Fill rows up to seq_len with several of the data set.
            split: Which part of a data set with several.
            language: Which message trees to keep.
            logging_steps: Optimizer steps per log line.
            save_steps: Optimizer steps per checkpoint; there is one at the end as well.
            keep_checkpoints: Older ones are deleted.
            output_dir: Folder for the checkpoints.
            resume: True goes on from the newest complete checkpoint in output_dir, a path from
                that one. The rows have to be the same.
            seed: Of new adapters and the order of rows.

        Returns:
            SFTTrainer's metrics (`train_loss`, `train_runtime` in seconds, ...), `global_step`,
            and what was streamed under `poros/...` (see StreamReport).

        Raises:
            RowsError: The rows are missing, empty, or not in a known form.
            CheckpointError: There is no complete checkpoint to go on from.
            ConfigError: The checkpoint is of another job, or a number is out of range.
            PorosError: See docs/errors.md.
        """
        _check_counts(
            steps=steps,
            seq_len=seq_len,
            batch_size=batch_size,
            accumulation=accumulation,
            logging_steps=logging_steps,
            save_steps=save_steps,
        )
        _check_range("seed", seed, 0)
        _check_share("learning_rate", learning_rate, math.inf)
        arguments = self._arguments(
            output_dir=str(output_dir),
            max_steps=steps,
            max_length=seq_len,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            learning_rate=learning_rate,
            lr_scheduler_type=lr_scheduler,
            warmup_steps=warmup_steps,
            packing=packing,
            logging_steps=logging_steps,
            save_steps=save_steps,
            save_total_limit=keep_checkpoints,
            seed=seed,
        )
        checkpoint = pick_checkpoint(resume, Path(output_dir))
        if checkpoint is not None:
            check_resumable(checkpoint, self._model_id, self.config, self.lora, steps)
        rows = self._rows(dataset, arguments, split=split, language=language)
        return self._run(arguments, rows, checkpoint)

    def _rows(self, dataset: Any, arguments: Any, *, split: str, language: str) -> Any:
        """Read the rows, and turn into tokens what does not come as a stream."""
        from datasets import Dataset

        from poros_hf.hf.preparation import prepare_rows
        from poros_hf.hf.rows import ensure_chat_template, load_rows

        rows = load_rows(dataset, split=split, language=language, token=self._location["token"])
        ensure_chat_template(self.tokenizer, rows)
        if isinstance(rows, Dataset):
            rows = prepare_rows(rows, self.tokenizer, arguments, dataset).rows
        return rows

    def save(self, folder: str | Path) -> Path:
        """Write adapter, tokenizer and poros_config.json; `poros_hf.from_pretrained` reads it.

        Everything is written and checked beside the folder first, then moved in file by file, so
        that no file is ever there in part. With several processes the first one writes.

        Args:
            folder: Made if it does not exist.

        Returns:
            The folder.

        Raises:
            ConfigError: Nothing has been trained yet.
            TrainingGuardError: The written adapter is not the trained one.
        """
        if not hasattr(self._model, "peft_config"):
            raise ConfigError(
                "nothing-trained",
                "there is no adapter to save before the first train()",
                remedies=["call train() first"],
            )
        target = Path(folder)
        if not self._is_writer:
            return target
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as beside:
            self._model.save_pretrained(beside)
            check_saved_adapter(Path(beside), self._model)
            self.tokenizer.save_pretrained(beside)
            for path in sorted(Path(beside).iterdir()):
                path.replace(target / path.name)
        self.config.save_pretrained(target)
        return target

    def _arguments(self, **values: Any) -> Any:
        """Return the SFTConfig, made before the model: it assigns this process its device."""
        from trl import SFTConfig

        return SFTConfig(
            bf16=self.config.compute_dtype == "bfloat16",
            fp16=self.config.compute_dtype == "float16",
            use_cpu=not torch.cuda.is_available(),
            save_strategy="steps",
            report_to="none",
            **values,
        )

    def _run(self, arguments: Any, rows: Any, checkpoint: Path | None) -> dict[str, Any]:
        from trl import SFTTrainer

        streaming = PorosStreaming()
        model = self.model
        if not hasattr(model, "peft_config"):
            self._model = None  # half made, should the trainer refuse it
        set_seed(arguments.seed)  # adapters are drawn before the Trainer sets its own seed
        trainer = SFTTrainer(
            model,
            args=arguments,
            train_dataset=rows,
            processing_class=self.tokenizer,
            peft_config=None if hasattr(model, "peft_config") else self.lora,
            callbacks=[streaming],
        )
        self._model = trainer.model
        self._is_writer = arguments.should_save
        try:
            with explained_training(trainer.model):
                result = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        finally:
            # The next trainer wraps the forward for its own precision.
            trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
        report = {f"poros/{name}": value for name, value in asdict(streaming.report).items()}
        return {**result.metrics, "global_step": result.global_step, **report}


def _known_keywords(method: Any) -> list[str]:
    """Return what `method` takes by name, and the fields of PorosConfig that it passes on."""
    parameters = inspect.signature(method).parameters.values()
    own = [item.name for item in parameters if item.kind is item.KEYWORD_ONLY]
    return [*own, *(item.name for item in fields(PorosConfig))]


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        _check_range(name, count, 1)


def _check_range(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            "config-value",
            f"{name}={value!r} must be a whole number from {least} up",
            field=name,
            value=value,
        )


def _check_share(name: str, value: Any, below: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value < below:
        raise ConfigError(
            "config-value",
            f"{name}={value!r} must be a number from 0 to below {below:g}",
            field=name,
            value=value,
        )

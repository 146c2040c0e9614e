"""What a training may not ask of a streamed model, refused by name when the trainer is made."""

from __future__ import annotations

from typing import Any

from poros_hf.config import PorosConfig
from poros_hf.errors import ConfigError, UnsupportedModelError

_NEEDS_BASE_WEIGHTS = ("pissa", "loftq", "olora", "corda", "eva")


def refuse_arguments(args: Any) -> None:
    """Refuse TrainingArguments that a streamed model cannot follow.

    Args:
        args: TrainingArguments or a subclass.

    Raises:
        ConfigError: Every offending argument is named.
    """
    offending = [
        f"{name}=True"
        for name in ("torch_compile", "bf16_full_eval", "fp16_full_eval")
        if getattr(args, name, False)
    ]
    offending += [name for name in ("fsdp", "deepspeed") if getattr(args, name, None)]
    if offending:
        raise ConfigError(
            "training-arguments",
            f"a streamed model does not work with {', '.join(offending)}",
            remedies=[
                "leave them out: torch.compile is not bit-stable with itself, full-precision "
                "evaluation casts the packed weights, and FSDP and DeepSpeed shard what is streamed"
            ],
            arguments=offending,
        )
    max_length = getattr(args, "max_length", None)
    if max_length is not None and max_length < 1:
        raise ConfigError(
            "training-arguments",
            f"max_length={max_length} leaves no token of a row",
            remedies=["set max_length=1024, say", "set max_length=null, to cut no row"],
            arguments=["max_length"],
        )


def refuse_micro_batches(config: PorosConfig, args: Any) -> None:
    """Refuse micro-batches inside layers where the training does not checkpoint the plain way.

    Args:
        config: Its `micro_batch_size` is looked at.
        args: TrainingArguments or a subclass.

    Raises:
        ConfigError: The argument is named.
    """
    if config.micro_batch_size == "auto":
        return
    options = args.gradient_checkpointing_kwargs or {"use_reentrant": False}
    offending = []
    if not args.gradient_checkpointing:
        offending.append("gradient_checkpointing=False")
    elif options != {"use_reentrant": False}:
        offending.append(f"gradient_checkpointing_kwargs={options}")
    if offending:
        raise ConfigError(
            "training-arguments",
            f"micro_batch_size={config.micro_batch_size} does not work with {offending[0]}: layers "
            "are recomputed rows by rows",
            remedies=["set gradient_checkpointing=True, without options", "leave it out"],
            arguments=offending,
        )


def refuse_adapters(model: Any) -> None:
    """Refuse adapters that read the base weights, and models with nothing to train.

    Args:
        model: The model that will be trained.

    Raises:
        UnsupportedModelError: There is no adapter, the offending one is named, or nothing is
            trainable.
    """
    configs = getattr(model, "peft_config", None)
    if not configs:
        raise UnsupportedModelError(
            "no-adapter",
            "the streamed base is frozen and there is no adapter to train",
            remedies=["pass peft_config=LoraConfig(...) to the trainer"],
        )
    for name, config in configs.items():
        refuse_adapter(name, config)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedModelError(
            "nothing-trainable",
            f"the model has adapters ({', '.join(configs)}), but none of their weights is to be "
            "trained: the run would end without an error and without having learned",
            remedies=[
                "load the adapter with is_trainable=True",
                "select it with model.set_adapter(...)",
            ],
            adapters=list(configs),
        )


def refuse_adapter(name: str, config: Any) -> None:
    """Refuse one adapter that reads the base weights.

    Args:
        name: Of the adapter, for the message.
        config: Its PeftConfig.

    Raises:
        UnsupportedModelError: The offending settings are named.
    """
    init = getattr(config, "init_lora_weights", True)
    wishes = []
    if getattr(config, "use_dora", False):
        wishes.append("use_dora=True")
    if isinstance(init, str) and init.lower().startswith(_NEEDS_BASE_WEIGHTS):
        wishes.append(f"init_lora_weights={init!r}")
    if wishes:
        raise UnsupportedModelError(
            "adapter-kind",
            f"adapter {name!r} with {', '.join(wishes)} reads the base weights, which are in the "
            "host store",
            remedies=["use plain LoRA (init_lora_weights=True, use_dora=False)"],
            adapter=name,
            wishes=wishes,
        )

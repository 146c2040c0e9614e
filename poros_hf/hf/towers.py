"""What stands beside the text decoder of a multimodal model: it is neither streamed nor trained."""

from __future__ import annotations

from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer

from poros_hf.errors import UnsupportedModelError, name_offenders


def refuse_tower_adapters(model: Any) -> None:
    """Refuse adapters on vision or audio towers and their projectors.

    Names like `q_proj`, and "all-linear", match them as well as the decoder; text alone would
    train none of them, and images would need layers that nobody has compared.

    Args:
        model: With its adapters.

    Raises:
        UnsupportedModelError: The offenders are named, with an `exclude_modules` that spares them.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone, decoder = base.base_model, base.get_decoder()
    spared = {*decoder.modules(), *_modules(base.get_output_embeddings())}
    names = [
        name
        for name, module in backbone.named_modules()
        if isinstance(module, BaseTunerLayer) and module not in spared
    ]
    if not names:
        return
    towers = "|".join(dict.fromkeys(name.partition(".")[0] for name in names))
    exclude = f"(.*[.])?({towers})([.].*)?"
    raise UnsupportedModelError(
        "adapter-on-tower",
        f"{len(names)} adapters are on what stands beside the text decoder, which is not trained: "
        f"{name_offenders(names)}",
        remedies=[f"pass exclude_modules={exclude!r} (to LoraConfig or PorosTrainer, or in YAML)"],
        names=names,
        exclude_modules=exclude,
    )


def _modules(module: Any) -> list[Any]:
    return [] if module is None else list(module.modules())

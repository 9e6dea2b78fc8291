"""fused_moe in axolotl: a plugin that makes a model's experts run on our kernels::

    plugins:
      - fused_moe.axolotl.FusedMoEPlugin
    fused_moe_quantize: int4  # in memory, before adapters are added; without this key they stay as they are

No other key is needed. Source: axolotl.integrations.base and .config, version 0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, model_validator

from .checks import fail


class FusedMoEPlugin(BasePlugin):
    """Registers "fused_moe" with transformers and PEFT, chooses it, and quantises experts on request.

    Example:
        Needs axolotl, in whose configuration it is::

            plugins:
              - fused_moe.axolotl.FusedMoEPlugin
    """

    def get_input_args(self) -> str:
        """Returns the name of the class of the plugin's keys."""
        return f"{__name__}.FusedMoEArgs"

    def register(self, cfg) -> None:
        """Registers with transformers, before the configuration is validated.

        axolotl goes on without plugins that it cannot import, so a transformers that is too old has to be
        found here.
        """
        from .transformers import register

        register()

    def pre_lora_load(self, cfg, model) -> None:
        """Quantises the experts, after the model has its implementation and before its adapters.

        Merging needs float weights.
        """
        if cfg.fused_moe_quantize and not cfg.merge_lora:
            from .transformers import quantize_experts

            quantize_experts(model, cfg.fused_moe_quantize)


class FusedMoEArgs(BaseModel):
    """The plugin's key, and the value of `experts_implementation`."""

    fused_moe_quantize: Literal["fp8_block", "fp8", "int8", "int4", "mxfp4"] | None = None

    @model_validator(mode="wrap")
    @classmethod
    def choose_experts(cls, data: dict[str, Any], handler: Callable) -> FusedMoEArgs:
        """Wrapped around the validators of all plugins: it sees what the user wrote, and has the last word.
        axolotl's own plugin of kernels would replace names that it does not know by "eager"."""
        from .transformers import FP8_NAME, NAME

        name = data.get("experts_implementation") or NAME
        if name not in (NAME, FP8_NAME):
            _refuse(f"experts_implementation {NAME} or {FP8_NAME}, or none", name)
        for key in ("use_scattermoe", "use_sonicmoe"):
            if data.get(key):
                _refuse(f"no {key}, whose kernels compute the same experts", "true")
        if data.get("expert_backend") in ("scattermoe", "sonicmoe"):
            _refuse("no expert_backend, whose kernels compute the same experts", data["expert_backend"])
        if (data.get("expert_parallel_size") or 1) > 1:
            _refuse("expert_parallel_size 1", data["expert_parallel_size"])
        if data.get("fused_moe_quantize") and not data.get("adapter"):
            _refuse("an adapter beside fused_moe_quantize: quantised experts do not train", "none")
        config = handler({**data, "experts_implementation": None})
        config.experts_implementation = name
        return config


def _refuse(expected: str, found: Any) -> None:
    fail(ValueError, "FusedMoEPlugin", expected, found)

"""What save_pretrained writes of experts that `quantize_experts` quantised, in layouts that are published.

| format    | quant_method, or compressed-tensors' format | tensors, of each expert                          |
| --------- | ------------------------------------------- | ------------------------------------------------ |
| fp8_block | fp8                                         | `weight`, `weight_scale_inv`                     |
| fp8       | float-quantized                             | `weight`, `weight_scale`                         |
| int8      | int-quantized                               | the same                                         |
| int4      | pack-quantized                              | `weight_packed`, `_scale`, `_shape`,             |
|           |                                             | perhaps `_zero_point`                            |
| mxfp4     | mxfp4-pack-quantized                        | `weight_packed`, `weight_scale`                  |
| mxfp4     | mxfp4, of gpt-oss                           | `gate_up_proj_blocks`, `_scales`, .. of all      |

save_pretrained asks the model's `hf_quantizer` for the state_dict, and then undoes transformers' renamings.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from transformers import FineGrainedFP8Config, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checks import fail
from ..quantized import QuantizedWeight, formats
from ..quantized.quantizing import options_of
from ..quantized.sharding import is_sharded
from .conversions import as_fp8, dense_names, names_of_matrices, why_not_stacked
from .experts import settings_of
from .weights import NAME, experts_of, first_name, is_adapted

if TYPE_CHECKING:
    from .weights import ExpertsModule

# compressed-tensors' target: the matrices of experts. transformers has the module of all experts alone, and a
# target that matches none is warned of at each load.
EXPERTS = r"re:.*\.experts(\.\d+\.\w+)?$"


class _Quantizer(HfQuantizer):
    """The `hf_quantizer` of a model whose experts quantize_experts has quantised."""

    is_trainable = is_compileable = True

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict | None, dict]:
        if _saves_adapters(model):
            return None, {}
        model.config.quantization_config = _config_of(model)
        state = model.state_dict()
        for module_name, experts in experts_of(model):
            for name in (first_name(experts), "down_proj"):
                full_name, w = f"{module_name}.{name}", getattr(experts, name)
                names = formats.FORMATS[w.format].names
                own = {part: state.pop(f"{full_name}.{n}", None) for part, n in names.items()}
                if isinstance(experts, GptOssExperts):
                    state |= {f"{full_name}_blocks": own["data"], f"{full_name}_scales": own["scale"]}
                    continue
                matrices = names_of_matrices(model, full_name)
                for part, tensor in _parts(w, len(matrices), **own).items():
                    for e, own_rows in enumerate(tensor):
                        for matrix, one in zip(matrices, own_rows.chunk(len(matrices)), strict=True):
                            state[matrix.replace("*", str(e)) + part] = _in_own_storage(one)
        return state, {}


def _in_own_storage(view: Tensor) -> Tensor:
    """The same memory, not copied. save_pretrained would copy all views of one storage before it writes the
    first shard, and count the storage as one tensor of a shard."""
    return from_dlpack(view.view(torch.uint8)).view(view.dtype)


class _IsSerializable:
    """`hf_quantizer.is_serializable` of one model: raises where a reload of what save_pretrained would write
    would have other experts. It is asked before adapters are saved, too, which then ignores the answer."""

    def __init__(self, model: PreTrainedModel):
        self.__setstate__(model)

    def __getstate__(self) -> PreTrainedModel:
        return self._model()  # a copy of the model, pickled or not, has an answer about the copy

    def __setstate__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)  # or nothing but the garbage collector would free a model

    def __call__(self, *args, **kwargs) -> bool:
        model = self._model()
        if _saves_adapters(model):
            return False
        reason = why_not_saved(model)
        if reason is not None:
            advice = "save them by torch.save(model.state_dict(), FILE), for a model that is quantised alike"
            found = f"experts that quantize_experts quantised: {reason}; {advice}"
            fail(ValueError, "save_pretrained", "weights that from_pretrained loads", found)
        return True


def _saves_adapters(model: PreTrainedModel) -> bool:
    return getattr(model, "_hf_peft_config_loaded", False)


def hold_quantizer(model: PreTrainedModel) -> None:
    """Has save_pretrained write the experts in a published layout, or raise."""
    if getattr(model, "hf_quantizer", None) is None:
        model.hf_quantizer = _Quantizer(QuantizationConfigMixin(NAME))
    model.hf_quantizer.is_serializable = _IsSerializable(model)


def why_not_saved(model: PreTrainedModel) -> str | None:
    """Why quantised experts of a model have no layout that from_pretrained reads."""
    loaded = getattr(model.config, "quantization_config", None)
    if isinstance(loaded, QuantizationConfigMixin):  # ours is a dict
        return f"the checkpoint was quantised, too, by {getattr(loaded.quant_method, 'value', 'another')}"
    found = experts_of(model)
    if any(is_adapted(name) for name, _ in found):
        return "they have PEFT's adapters; save those, or merge or unload them"
    weights = [getattr(experts, name) for _, experts in found for name in (first_name(experts), "down_proj")]
    if not all(isinstance(w, QuantizedWeight) for w in weights):
        return "some of the model's experts are not quantised"
    w = weights[0]
    if any(is_sharded(p) for w in weights for p in w.parameters()):
        return "they are sharded"
    if len({(w.format, w.compute, *options_of(w).values()) for w in weights}) > 1:
        return "they differ in format, options or compute"
    if w.smooth is not None:
        return "no published layout has the factors of compute 'int8_smooth'; compute 'int8' is saved"
    if w.power_of_two:
        return "their power_of_two is in no layout"
    if _are_of_gpt_oss(found):
        return None if w.format == "mxfp4" else f"gpt-oss is published in mxfp4, and they are {w.format}"
    reason = why_not_stacked(model, [experts for _, experts in found])
    return _why_not_fp8(found) if reason is None and w.format == "fp8_block" else reason


def _are_of_gpt_oss(found: list[tuple[str, ExpertsModule]]) -> bool:
    return all(isinstance(experts, GptOssExperts) for _, experts in found)


def _why_not_fp8(found: list[tuple[str, ExpertsModule]]) -> str | None:
    """Why transformers' FP8Experts do not take experts of format fp8_block."""
    for name, experts in found:
        E, D, F = experts.down_proj.shape
        if experts.has_gate and F % formats.BLOCK:
            return f"gate and up have {F} rows each, and blocks of 128 x 128 begin anew where up does"
        theirs = as_fp8(experts, FineGrainedFP8Config())
        same = (
            theirs is not None
            and name.endswith("experts")  # which transformers replaces
            and theirs.down_proj.shape == (E, D, F)
            and settings_of(theirs) == settings_of(experts)
        )
        if not same:
            return f"transformers' FP8Experts do not compute what {type(experts).__name__} do"
    return None


# --- layouts ------------------------------------------------------------------------------------------------


def _config_of(model: PreTrainedModel) -> dict:
    """config.json's quantization_config."""
    found = experts_of(model)
    dense = dense_names(model, [f"{name}." for name, _ in found])
    w = found[0][1].down_proj
    if w.format == "fp8_block":
        blocks = [formats.BLOCK, formats.BLOCK]
        activations = {"activation_scheme": "dynamic", "weight_block_size": blocks}
        return {"quant_method": "fp8", **activations, "modules_to_not_convert": dense}
    if _are_of_gpt_oss(found):
        return {"quant_method": "mxfp4", "modules_to_not_convert": dense}
    options, inputs = options_of(w), None
    kind, weights = {
        "int4": ("pack-quantized", {"num_bits": 4, "type": "int"}),
        "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "scale_dtype": "torch.uint8"}),
        "int8": ("int-quantized", {"num_bits": 8, "type": "int"}),
        "fp8": ("float-quantized", {"num_bits": 8, "type": "float"}),
    }[w.format]
    weights |= {"symmetric": options.get("symmetric", True)}
    if w.compute != "codes":
        inputs = {**weights, "strategy": "token", "dynamic": True}
    if "per_tensor" in options:
        weights |= {"strategy": "tensor" if options["per_tensor"] else "channel"}
    else:
        weights |= {"strategy": "group", "group_size": options.get("group_size", formats.MX_GROUP)}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": [EXPERTS], "weights": weights, "input_activations": inputs}},
        "ignore": dense,
    }


def _parts(
    w: QuantizedWeight, matrices: int, data: Tensor, scale: Tensor, zero: Tensor | None = None
) -> dict[str, Tensor]:
    """{what names in a checkpoint have after `weight`: the tensor of all experts}. The rows of w are those of
    several matrices."""
    E, rows, cols = w.shape
    if w.format == "fp8_block":
        return {"": data, "_scale_inv": scale}
    if w.format == "mxfp4":
        return {"_packed": data.flatten(-2), "_scale": scale}
    if w.format != "int4":
        # A scale of the whole weight is that of each matrix.
        scale = scale if scale.size(1) == rows else scale.view(E, 1).repeat(1, matrices)
        return {"": data, "_scale": scale}
    shape = torch.tensor([rows // matrices, cols] * matrices).repeat(E, 1)
    parts = {"_packed": data, "_scale": scale, "_shape": shape}
    if zero is not None:
        parts["_zero_point"] = formats.pack_zeros(zero)
    return parts

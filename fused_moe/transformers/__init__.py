"""fused_moe in Hugging Face transformers: an implementation for its experts interface::

    import fused_moe.transformers

    fused_moe.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="fused_moe")

"fused_moe_fp8" is the same with FP8 training (docs/fp8.md): float experts that gain from it multiply e4m3 by
e4m3, forward and backward, in training and after it.

The model keeps its router, shared experts and checkpoint; only the computation of the routed experts is
replaced. Their parameters are used in place: packed in halves or interleaved, transposed or not, quantised or
not. No step copies a weight. Quantised ones are arranged as tiles once, on GPUs whose kernels read those. The
module tells what its experts compute: the flags that transformers' decorator sets, the gate function and the
activation. Experts with a gate, an activation, a norm or a storage that no kernel supports run as they would
without us, and a warning says so once.

Three things keep quantised experts packed. `experts_forward` reads the parameters of FP8Experts. The
quantizers registered here load experts as a checkpoint stores them, where transformers would unpack them. And
`quantize_experts` quantises the experts of a model in memory, which save_pretrained then writes as published
checkpoints have them.
"""

from __future__ import annotations

import importlib.util
from functools import partial

from ..checks import check_bool, check_choice

try:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

    # The registry that models read. Earlier releases have none: they accept only built-in names.
    from transformers.modeling_utils import ALL_EXPERTS_FUNCTIONS
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    from transformers.quantizers.base import HfQuantizer

    from . import replay  # noqa: F401 - lets recordings find the routers
    from .experts import experts_forward, set_default, warn_once
    from .packed import PackedCompressedTensors, PackedFp8, PackedMxfp4
    from .quantizing import quantize_experts, requantized_merges
    from .weights import FP8_NAME, NAME
except ImportError as error:
    raise ImportError(
        "fused_moe.transformers needs Hugging Face transformers with an experts interface that is open to "
        f"other implementations: pip install 'transformers>=5.7' ({error})"
    ) from error

__all__ = ["FP8_NAME", "NAME", "experts_forward", "quantize_experts", "register", "requantized_merges"]


QUANTIZERS = {"mxfp4": PackedMxfp4, "compressed-tensors": PackedCompressedTensors, "fp8": PackedFp8}


def register(*, compute: str = "fp8", default: bool | None = None) -> None:
    """Registers "fused_moe" and "fused_moe_fp8" as experts implementations of transformers.

    `experts_implementation=` and `set_experts_implementation` know these names from then on. Call it before a
    model is loaded, or before its implementation is set. Calling it again does no harm. FP8 experts have a
    separate registry. Checkpoints in FP8, MXFP4 and of compressed-tensors get quantizers that do what
    transformers' do, and keep the experts packed in models that ask for either name. "fused_moe" also becomes
    an `ep_implementation` of DistributedConfig, which sends a token once per rank. Where PEFT is installed,
    its LoRA of experts' weights is computed by our kernels from then on.
    Source: transformers.integrations.moe, finegrained_fp8; transformers.quantizers.

    Args:
        compute: of experts of checkpoints in 8 bits that ask for activations in 8 bits, quantised in each
            call, while they are not in training. "fp8" does that, int8 beside int8, and has no gradient:
            backward raises. "codes" does not, nor do any experts in training. Register before a model's first
            call: on GPUs the layout that its weights get then depends on it.
        default: True makes "fused_moe" the implementation of models that are made without the argument, from
            `from_pretrained` or otherwise, if transformers would choose grouped_mm: experts that no kernel
            here computes run as by transformers, and a warning says so once. False restores transformers'
            choice. None leaves it as it is.

    Raises:
        TypeError: default is no bool.
        ValueError: compute is neither "fp8" nor "codes".

    Example:
        Needs transformers, and a model from the hub.

        >>> import fused_moe.transformers, transformers  # doctest: +SKIP
        >>> fused_moe.transformers.register()  # doctest: +SKIP
        >>> model = transformers.AutoModelForCausalLM.from_pretrained(
        ...     "Qwen/Qwen3-30B-A3B", experts_implementation="fused_moe"
        ... )  # doctest: +SKIP
    """
    check_choice("register", "compute", compute, ("fp8", "codes"))
    if default is not None:
        check_bool("register", "default", default)
        set_default(default)
    forward = experts_forward if compute == "fp8" else partial(experts_forward, compute=compute)
    for registry in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        registry.register(NAME, forward)
        registry.register(FP8_NAME, partial(experts_forward, compute=compute, fp8=True))
    _plug_into_expert_parallelism()
    _plug_into_peft()
    if not hasattr(HfQuantizer, "serialized_names"):
        return  # an earlier release, which loads checkpoints otherwise: it unpacks them
    # transformers' register_quantizer takes new names alone, but the checkpoint says the name.
    for method, ours in QUANTIZERS.items():
        if AUTO_QUANTIZER_MAPPING[method] in ours.__bases__:  # not another package's
            AUTO_QUANTIZER_MAPPING[method] = ours


def _plug_into_expert_parallelism() -> None:
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface

        from .parallel import FusedEP
    except ImportError:  # an earlier release, or PyTorch without torch.distributed
        return
    EPImplementationInterface.register(NAME, FusedEP)


def _plug_into_peft() -> None:
    try:
        if importlib.util.find_spec("peft") is None:
            return
        from . import peft

        peft.plug_in()
    except Exception as error:  # a release with other classes, or one that does not load
        what = "it adds adapters to the weights of float experts itself, and finds no quantised ones"
        warn_once("PEFT", f"does not know this release of PEFT ({error!r}): {what}")

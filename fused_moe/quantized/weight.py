"""QuantizedWeight: an expert weight of 8 or 4 bits, in place of the tensors w1, w2 and w3."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..checks import FLOATING, check_bool, check_choice, check_range, check_stored, fail
from ..paths import why_altered
from . import computing, formats, sharding, state, tiles
from .copies import Copies
from .formats import FORMATS

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FN = "QuantizedWeight"
AnyTensor = TypeVar("AnyTensor", bound=Tensor)


class QuantizedWeight(nn.Module):
    """A frozen expert weight (E, out, in) as codes and scales; `fused_moe.quantized.formats` has the formats.

    `fused_experts`, `grouped_mlp` and the experts of `FusedMoE` take it in place of a weight that is not
    transposed. x and scores get gradients through it; it gets none.

    Its parameters need no gradient. Its state_dict has the names and the layout of the format's checkpoints,
    with E as the first dimension: `weight` and `weight_scale_inv` (fp8_block), `weight` and `weight_scale`
    (fp8, int8), `weight_packed` int32, `weight_scale` and `weight_zero_point` int8 as of compressed-tensors
    (int4), `blocks` and `scales` as of gpt-oss (mxfp4). The parameters have the same names, and the same
    layout unless `is_tiled`: on GPUs of compute capability 9.x, if out and in are multiples of 64 and there
    are kernels for the weight's dtype, they are tiles, as `fused_moe.quantized.tiles` describes them.
    `load_state_dict` arranges published tensors, and copying one into such a parameter raises.

    Args:
        data: codes: float8_e4m3fn (E, out, in) of fp8_block and fp8; int8 (E, out, in) of int8; uint8
            (E, out, in / 2) of int4 and mxfp4, the even column in the lower half of a byte. Codes of int4 are
            stored plus 8.
        scale: float32 (E, ceil(out / 128), ceil(in / 128)) of fp8_block; floating (E, out, 1) or (E, 1, 1) of
            fp8 and int8; floating (E, out, in / g) of int4, with g 32, 64 or 128; uint8 (E, out, in / 32) of
            mxfp4, which means 2^(scale - 127), and NaN for 255. NaN makes its block NaN.
        zero: int8 zero points of int4, from -8 to 7, of scale's shape; None: zeros.
        format: fp8_block, fp8, int8, int4 or mxfp4.
        shape: (E, out, in).
        dtype: of `dequantize()` without an argument, and of the adapters that `add_lora` makes.
        trainable: see `set_trainable`.
        compute: see `set_compute`.
        smooth: (E, in) float32, finite and > 0, only with compute "int8_smooth": what the weight's input is
            divided by. The codes are of weight * smooth, and so is `dequantize()`. It is a parameter of this
            name, and in the state_dict.
        power_of_two: see `set_compute`.

    `.to(device)` moves it, into tiles or out of them; `.to(dtype)` changes `dtype`, and no code or scale.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> codes, scale = torch.ones(2, 8, 64, dtype=torch.int8), torch.full((2, 8, 1), 0.5)
        >>> w = fused_moe.QuantizedWeight(codes, scale, format="int8", shape=(2, 8, 64))
        >>> w.dequantize(torch.float32)[0, 0, 0]
        tensor(0.5000)
        >>> w.nbytes
        1088
    """

    # What is kept beside the parameters: the second packing; and codes as published beside tiles, with scales
    # in float32. Not buffers: DistributedDataParallel sends those to all ranks before every forward.
    data_t = scale_t = zero_t = data_p = scale_p = None
    _kept: tuple[str, ...] = ()  # the names of those that there are
    _kept_of: list[tuple[Tensor, tuple]] = []  # the parameters that they were made of, and their states
    _is_trainable = False
    _compute, _power_of_two = "codes", False
    _checked: tuple = ()  # shapes of parameters that were found right
    _sharded_dtypes: dict[str, torch.dtype] = {}  # of parameters that are integers while they are sharded

    if TYPE_CHECKING:
        smooth: Tensor | None

    def __init__(
        self,
        data: Tensor,
        scale: Tensor,
        zero: Tensor | None = None,
        *,
        format: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.bfloat16,
        trainable: bool = False,
        compute: str = "codes",
        smooth: Tensor | None = None,
        power_of_two: bool = False,
    ):
        super().__init__()
        check_choice(FN, "format", format, FORMATS)
        check_bool(FN, "trainable", trainable)
        computing.check_compute(FN, compute, format, smooth, power_of_two)
        if dtype not in FLOATING:
            fail(TypeError, FN, "a floating dtype", dtype)
        if not isinstance(shape, (tuple, list)) or len(shape) != 3 or not all(map(_is_size, shape)):
            fail(ValueError, FN, "shape (E, out, in) of sizes >= 1", shape)
        self.format, self.shape, self.dtype = format, torch.Size(shape), dtype
        rules = FORMATS[format]
        E, rows, cols = self.shape
        scale_shapes = formats.scale_shapes(format, self.shape)
        if not scale_shapes:
            groups = " or ".join(map(str, rules.groups))
            fail(ValueError, FN, f"format {format} of a width that is a multiple of {groups}", cols)
        check_stored(FN, "data", data, 3, (rules.data_dtype,))
        _check_shape("data", data, [(E, rows, cols // rules.per_byte)])
        check_stored(FN, "scale", scale, 3, rules.scale_dtypes)
        _check_shape("scale", scale, scale_shapes)
        if zero is not None:
            if "zero" not in rules.names:
                fail(ValueError, FN, f"no zero points in format {format}", "some")
            check_stored(FN, "zero", zero, 3, (torch.int8,))
            _check_shape("zero", zero, [tuple(scale.shape)])
            check_range(FN, "zero", zero, -8, 7)
        for name, tensor in (("scale", scale), ("zero", zero)):
            if tensor is not None and tensor.device != data.device:
                fail(ValueError, FN, f"{name} on data's device {data.device}", tensor.device)
        if smooth is not None:
            computing.check_smooth(FN, "smooth", smooth, E, cols, data.device)
        self._scale_dtype = scale.dtype  # which tiles may not have
        for name, tensor in (("data", _as_named(format, data)), ("scale", scale), ("zero", zero)):
            if name in rules.names:
                self.register_parameter(rules.names[name], _frozen(tensor))
        self.register_parameter("smooth", _frozen(smooth))
        self._is_trainable, self._compute, self._power_of_two = trainable, compute, power_of_two
        self._copies = Copies()
        self._arrange()

    def __setattr__(self, name: str, value) -> None:
        """As nn.Module. FSDP2 sets sharded and gathered parameters by it, because the class has its own."""
        if isinstance(value, Tensor) and name in self.__dict__.get("_parameters", ()):
            if sharding.is_sharded(value):
                value = self._as_sharded(name, value)
            elif self._sharded_dtypes.get(name, value.dtype) != value.dtype:
                value = _frozen(value.view(self._sharded_dtypes[name]))
        elif name == "__class__":
            sharding.check_class(value)
        super().__setattr__(name, value)

    def forward(self, *, as_stored: bool = False) -> Tensor | tuple[Tensor | None, ...]:
        """Returns `dequantize()`, or the parameters, which hooks of this module may provide."""
        if as_stored:
            # Not the parameters themselves: a hook after the call may take their memory away.
            return tuple(None if p is None else p.detach() for p in self._parameters.values())
        return _dequantized(self)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the weight (E, out, in) in `dtype`, by default self.dtype."""
        return _dequantized(read(self), dtype)

    @property
    def data(self) -> Tensor:
        """The codes, as the constructor takes them: a view; a copy if `is_tiled`."""
        return self._given("data")

    @property
    def scale(self) -> Tensor:
        """The scales, as the constructor takes them: a view; a copy if `is_tiled`."""
        return self._given("scale")

    @property
    def zero(self) -> Tensor | None:
        """The zero points, as the constructor takes them, or None: a view; a copy if `is_tiled`."""
        return self._given("zero")

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """data, scale, zero as operators take them: as the constructor does, or the tiles if `is_tiled`."""
        self._copies.check()
        data, scale, zero = self._all()
        if scale.dim() == 3:
            return _codes(self.format, data), scale, zero
        if data.dim() == scale.dim() == 4:  # zero points are flattened where scales are
            return data, scale, zero
        zero = None if zero is None else tiles.scale_of(self.format, zero, self.shape)
        return tiles.data_of(data, self.shape), tiles.scale_of(self.format, scale, self.shape), zero

    @property
    def transposed_tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """data, scale and zero of the second packing as operators take them; None where there is none.

        If tiles were written in place since, as DistributedDataParallel does once, it is written again. That
        is not seen in compiled code, nor where tensors have no versions: `fused_moe.refresh_weights`."""
        if self.data_t is None or not self._has_kept():
            return None, None, None
        return self.data_t, self.scale_t, self.zero_t

    @property
    def eight_bit_tensors(self) -> tuple[Tensor, Tensor] | None:
        """data as the constructor takes it, and scale in float32; None if the weight is in tiles alone.

        `torch.ops.fused_moe.experts` takes them with eight_bits.
        """
        self._copies.check()
        data, scale, _ = self._all()
        if self._kept and self._has_kept() and self.scale_p is not None:
            return data if self.data_p is None else self.data_p, self.scale_p
        if scale.dim() != 3:
            return None
        return data, scale if scale.dtype == torch.float32 else scale.float()

    @property
    def compute(self) -> str:
        """How experts multiply it, as the constructor or `set_compute` was told last."""
        return self._compute

    @property
    def power_of_two(self) -> bool:
        """Whether the scales of what is multiplied by it are powers of two."""
        return self._power_of_two

    @property
    def is_tiled(self) -> bool:
        """Whether the parameters are tiles, of four dimensions or two."""
        return self._of("scale").dim() != 3

    @property
    def is_trainable(self) -> bool:
        """What the constructor or `set_trainable` was told last."""
        return self._is_trainable

    def set_trainable(self, trainable: bool = True) -> QuantizedWeight:
        """Keeps what makes training through the weight faster, or drops it; the weight stays frozen.

        Where the weight is in tiles, it is then kept transposed, too: twice the packed bytes, the same
        values, and a faster backward while experts have up to 768 rows on average; but int4 with float32
        scales is dequantised. Elsewhere nothing is made before the weight is moved to such a GPU. Returns the
        weight.
        """
        check_bool(f"{FN}.set_trainable", "trainable", trainable)
        self._is_trainable = trainable
        self._arrange()
        return self

    def set_compute(self, compute: str, *, power_of_two: bool = False) -> QuantizedWeight:
        """Chooses how `fused_experts` and the experts of `FusedMoE` multiply the weight. Returns the weight.

        "codes" multiplies 16-bit rows by its values. "fp8" (of fp8_block and fp8), "int8" and "int8_smooth"
        (of int8) round the rows to the weight's 8 bits, too. Such a weight keeps the published layout. On
        GPUs that multiply no FP8, all but those of compute capability 9.0, "fp8" computes what "codes" does.
        "auto" (of these three formats) takes codes where experts have up to 16 rows on average, else 8 bits:
        a token's bits then depend on its batch. On Hopper it keeps tiles and, beside them, the published
        codes: twice the packed bytes.

        Args:
            compute: one of these. A weight with a smooth has "int8_smooth".
            power_of_two: whether the rows' scales are rounded up to powers of two, as models expect whose
                scale_fmt is ue8m0; of fp8_block and fp8 alone.

        Raises:
            TypeError: for a wrong type or dtype.
            ValueError: for a wrong shape, device or value. The message says what was expected and what was
                found.
        """
        fn = f"{FN}.set_compute"
        computing.check_compute(fn, compute, self.format, self.smooth, power_of_two)
        self._compute, self._power_of_two = compute, power_of_two
        self._arrange()
        return self

    def refresh(self) -> None:
        """Rebuilds what is kept beside the parameters; `fused_moe.refresh_weights` says when to call it."""
        if self._kept:
            self._keep()

    @property
    def code(self) -> int:
        """The format as `torch.ops.fused_moe.quantized_mm` takes it."""
        return formats.NUMBERS[self.format]

    @property
    def device(self) -> torch.device:
        """The device of codes and scales."""
        return self._of("scale").device

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters and of what is kept beside them."""
        tensors = (*self.parameters(), *(getattr(self, name) for name in self._kept))
        return sum(t.nbytes for t in tensors if t is not None)

    def dim(self) -> int:
        """Returns 3."""
        return 3

    @overload
    def size(self, dim: None = None) -> torch.Size: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self, dim: int | None = None) -> torch.Size | int:
        """Returns (E, out, in), or one of them."""
        return self.shape if dim is None else self.shape[dim]

    def extra_repr(self) -> str:
        """What `print` shows of the weight."""
        text = f"format={self.format!r}, shape={tuple(self.shape)}, dtype={self.dtype}"
        if self.compute != "codes":
            text += f", compute={self.compute!r}"
        for name, value in (("smooth", self.smooth), ("power_of_two", self.power_of_two)):
            text += f", {name}=True" if value is not None and value is not False else ""
        return text + (", trainable=True" if self.is_trainable else "")

    def _smooth(self) -> Tensor | None:
        own = self._parameters
        return own["smooth"] if "smooth" in own else self.smooth

    @overload
    def _of(self, name: Literal["data", "scale"]) -> Tensor: ...
    @overload
    def _of(self, name: str) -> Tensor | None: ...
    def _of(self, name: str) -> Tensor | None:
        own, parameters = FORMATS[self.format].names.get(name), self._parameters
        if own in parameters:  # an attribute takes ten times as long
            return parameters[own]
        return None if own is None else getattr(self, own)

    def _all(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """data, scale and zero as they are stored. Every call of operators asks for them twice."""
        own: dict[str, Any] = self._parameters
        names = FORMATS[self.format].names
        if len(own) <= len(names):  # beside smooth; some are plain attributes
            return self._of("data"), self._of("scale"), self._of("zero")
        zero = own[names["zero"]] if "zero" in names else None
        return own[names["data"]], own[names["scale"]], zero

    def _tiles_of(self, name: str, parameter: Tensor) -> Tensor:
        """A parameter that is tiles, in the dimensions that operators take."""
        if name == "data":
            return tiles.data_of(parameter, self.shape)
        return tiles.scale_of(self.format, parameter, self.shape)

    @overload
    def _published(self, name: Literal["data", "scale"]) -> Tensor: ...
    @overload
    def _published(self, name: str) -> Tensor | None: ...
    def _published(self, name: str) -> Tensor | None:
        """data, scale or zero as the constructor takes them."""
        stored = self._of(name)
        if stored is None:
            return None
        if not self.is_tiled:
            return _codes(self.format, stored) if name == "data" else stored
        stored = self._tiles_of(name, stored)
        if name == "data":
            return tiles.published_data(self.format, stored)
        dtype = self._scale_dtype if name == "scale" else stored.dtype
        return tiles.published_scale(self.format, stored, dtype)

    @overload
    def _given(self, name: Literal["data", "scale"]) -> Tensor: ...
    @overload
    def _given(self, name: str) -> Tensor | None: ...
    def _given(self, name: str) -> Tensor | None:
        """The same for users, who might write into it."""
        self._copies.check()
        published = self._published(name)
        if published is None or not self.is_tiled:
            return published
        return self._copies.give(FORMATS[self.format].names[name], published)

    @property
    def _is_sharded(self) -> bool:
        return sharding.is_sharded(self._of("scale"))

    def _as_sharded(self, name: str, shards: DTensor) -> Tensor:
        """A parameter's shards as they are stored. What is kept beside them, of all experts, is dropped."""
        self._drop_kept()
        if self.is_tiled and any(p.is_shard() and p.dim != 0 for p in shards.placements):  # type: ignore[attr-defined]
            fail(ValueError, FN, "shards of experts, Shard(0), of a weight in tiles", shards.placements)
        if not (shards.is_floating_point() and sharding.TAKES_INTEGERS):
            return shards
        self._sharded_dtypes = self._sharded_dtypes | {name: shards.dtype}
        return _frozen(sharding.viewed(shards, sharding.INTEGERS[shards.itemsize]))

    def _dtype_of(self, name: str, shards: Tensor) -> torch.dtype:
        is_own = shards.is_floating_point() or name not in self._sharded_dtypes
        return shards.dtype if is_own else self._sharded_dtypes[name]

    def _local(self) -> QuantizedWeight:
        """A weight of this rank's experts, in the memory of the shards."""
        tensors = {
            name: None if p is None else sharding.local_of(p, self._dtype_of(name, p))
            for name, p in self._parameters.items()
        }
        local = _of_tensors(self, tensors)
        local.shape = torch.Size((local._of("scale").size(0), *self.shape[1:]))
        return local

    def _published_shards(self) -> dict[str, nn.Parameter]:
        own = {name: p for name, p in self._parameters.items() if p is not None}
        if not self.is_tiled:
            return {name: _frozen(sharding.viewed(p, self._dtype_of(name, p))) for name, p in own.items()}
        local = self._local()._published_parameters()
        E = self.shape[0]
        return {name: _frozen(sharding.like(own[name], t, (E, *t.shape[1:]))) for name, t in local.items()}

    def _write_shards(self, before: dict[str, nn.Parameter | None], published: dict) -> None:
        """Puts the shards `before` back, and what was loaded into `published` with them."""
        if before_is_tiled := _of_tensors(self, before).is_tiled:
            self._local()._tile(_of_tensors(self, before)._local()._parameters)
        for name, shards in before.items():
            if before_is_tiled or self._parameters[name] is published.get(name):
                self._parameters[name] = shards

    def _published_parameters(self) -> dict[str, nn.Parameter]:
        """{name: parameter} in the layout of checkpoints."""
        if self._is_sharded:
            return self._published_shards()
        stored = {name: self._published(name) for name in ("data", "scale", "zero")}
        codes = stored["data"]
        assert codes is not None
        stored["data"] = _as_named(self.format, codes)
        names = FORMATS[self.format].names
        return {names[key]: _frozen(tensor) for key, tensor in stored.items() if tensor is not None}

    def _arrange(
        self, before: dict[str, nn.Parameter | None] | None = None, *, is_loaded: bool = False
    ) -> None:
        """Puts the parameters into the layout that their device's kernels read, and makes or drops what is
        kept beside them. `before` are tiles from which the parameters were published. Those are written
        again, and so is what is kept if the weight is loaded, since a CUDA graph may read them. Shards keep
        their layout, which FSDP2 has noted."""
        if self._is_sharded:
            return
        is_whole = all(t.device == self.device for t in self._stored())  # or it is loaded in parts
        is_wanted = is_whole and self._wants_tiles()
        if is_wanted and not self.is_tiled:
            self._tile(before or {})
        elif self.is_tiled and not is_wanted:
            self._parameters.update(self._published_parameters())
        wanted = self._wanted() if is_whole else ()
        if self._kept != wanted:
            self._drop_kept()
        if wanted and (is_loaded or not self._kept):
            self._kept = wanted
            self._keep()

    def _wants_tiles(self) -> bool:
        """GEMMs of 8 bits by 8 bits read the published layout alone."""
        are_read = not computing.runs_on(self.format, self.device) or self.compute in ("codes", "auto")
        return are_read and tiles.are_wanted(
            self.device, self.shape, self.format, self.dtype, self._scale_dtype
        )

    def _wanted(self) -> tuple[str, ...]:
        """The names of what is to be kept beside the parameters."""
        of_eight_bits: tuple[str, ...]
        if self.compute == "codes" or not computing.runs_on(self.format, self.device):
            of_eight_bits = ()
        elif self.is_tiled:
            of_eight_bits = "data_p", "scale_p"
        else:
            of_eight_bits = () if self._of("scale").dtype == torch.float32 else ("scale_p",)
        of_backward = ("data_t", "scale_t", "zero_t") if self.is_tiled and self.is_trainable else ()
        return (*of_backward, *of_eight_bits)

    def _tile(self, before: dict[str, nn.Parameter | None]) -> None:
        names = FORMATS[self.format].names
        published = {key: self._published(key) for key in names}
        for key, tensor in published.items():
            if tensor is None:
                continue
            out = _if_on(tensor.device, before.get(names[key]))
            convert = tiles.tiled_data if key == "data" else tiles.tiled_scale
            if out is not None and key != "data":
                shape, dtype = tiles.scale_parameter(self.format, self.shape[1], tensor)
                out = out if (tuple(out.shape), out.dtype) == (shape, dtype) else None
            into = None if out is None else self._tiles_of(key, out)
            tiled = convert(self.format, tensor, self.shape, into)
            if out is None:
                parameter = self._parameters[names[key]]
                assert parameter is not None
                shape = tiles.parameter_shape(tiled.shape, parameter.shape)
                out = _frozen(tiled.view(shape))
                self._drop_kept()  # it may have other sizes
            self._parameters[names[key]] = out

    def _drop_kept(self) -> None:
        self.data_t = self.scale_t = self.zero_t = self.data_p = self.scale_p = None
        self._kept, self._kept_of = (), []  # or the tiles would stay in memory

    def _has_kept(self) -> bool:
        """Whether something is kept beside these parameters. It is brought up to date."""
        if not self._kept:
            return False
        if torch.compiler.is_compiling():
            return True
        now = self._stored()
        # They are other tensors inside torch.func.functional_call.
        if any(tensor is not source for tensor, (source, _) in zip(now, self._kept_of, strict=True)):
            return False
        if any(write_state(tensor) != state for tensor, state in self._kept_of):
            self._keep()
        return True

    def _stored(self) -> list[Tensor]:
        return [t for t in self._all() if t is not None]

    def _keep(self) -> None:
        """Makes what is kept, in the memory that it has if that is on the weight's device."""
        with torch.inference_mode(False):  # or it could not be written, nor saved for backward, outside
            for name in self._kept:
                tensor = self._published(name.partition("_")[0])
                if tensor is not None:
                    out = _if_on(tensor.device, getattr(self, name))
                    tensor = self._as_kept(name, tensor, out)
                setattr(self, name, tensor)
        self._kept_of = [(t, write_state(t)) for t in self._stored()]

    def _as_kept(self, name: str, published: Tensor, out: Tensor | None) -> Tensor:
        if name.endswith("_t"):
            convert = tiles.transposed_data if name == "data_t" else tiles.transposed_scale
            return convert(self.format, published, self.shape, out)
        made = published if name == "data_p" else published.float()
        return made if out is None or out.shape != made.shape else out.copy_(made)

    def _apply(self, fn, recurse=True):
        """As nn.Module, but codes and scales keep their dtypes: fn gets their bytes."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        has_kept = self._has_kept()
        for name, parameter in self.named_parameters(recurse=False):
            self._parameters[name] = _frozen(_applied(fn, parameter))
        if not (has_kept and self.is_tiled == self._wants_tiles() and self._kept == self._wanted()):
            self._drop_kept()
        for name in self._kept:
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else _applied(fn, tensor))
        self._kept_of = [(t, write_state(t)) for t in self._stored()]
        self._arrange()
        return self

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        self._parameters.setdefault("smooth", None)  # pickled by an older version
        self._copies = Copies()
        self._arrange()  # torch.load may have moved it to another device

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self._copies.check()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not (self.is_tiled or self._is_sharded):
            return
        for name, published in self._published_parameters().items():
            copy = published if keep_vars else published.detach()
            destination[prefix + name] = copy if self._is_sharded else self._copies.give(name, copy)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        """As nn.Module, but takes the scales' dtype and shape, and whether there are zero points, from the
        state_dict, and refuses other formats and dtypes, which nn.Module would cast or assign. Meanwhile
        tiles are as published."""
        names = FORMATS[self.format].names
        given = state.given_tensors(self.format, state_dict, prefix)
        self._copies.forget([names[key] for key in given])
        is_sharded = self._is_sharded
        before = dict(self._parameters) if self.is_tiled or is_sharded else None
        if is_sharded and self.is_tiled:
            local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        published: dict[str, nn.Parameter] = {}
        try:
            if before is not None:
                published = self._published_parameters()
                self._parameters.update(published)
            own = {key: self._of(key) for key in names}
            wrong = state.wrong_tensors(self.format, self.shape, given)
            error_msgs += [f"{prefix}{names[key]}: {message}" for key, message in wrong.items()]
            foreign = state.foreign_format(self.format, state_dict, prefix)
            if foreign is not None:
                error_msgs.append(foreign)
            elif not wrong:
                is_assigned = local_metadata.get("assign_to_params_buffers", False)
                self._make_room(own, given, is_assigned)
            for key in given if foreign is not None or "data" in wrong else wrong:  # these stay as they were
                if own[key] is None:
                    del state_dict[prefix + names[key]]
                else:
                    state_dict[prefix + names[key]] = own[key].detach()
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
            self._scale_dtype = self._dtype_of(names["scale"], self._of("scale"))
        finally:
            if is_sharded:
                self._write_shards(before, published)
            self._arrange(before, is_loaded=True)

    def _make_room(self, own: dict[str, Tensor | None], given: dict[str, Tensor], is_assigned: bool) -> None:
        """Replaces parameters that differ from given tensors in what the format leaves open."""
        names = FORMATS[self.format].names
        for key, tensor in state.replacements(self.format, self.shape, own, given).items():
            plain = all(type(t) in (Tensor, nn.Parameter) for t in own.values() if t is not None)
            is_captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not plain or is_captured:
                why = "a CUDA graph is captured" if is_captured else "it is sharded"
                expected = f"{names[key]} as the parameter is while {why}, {state.described(own[key])}"
                fail(ValueError, state.FN, expected, state.described(tensor))
            if tensor is not None:
                device = "meta" if is_assigned else self.device
                tensor = _frozen(
                    torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
                )
            self._parameters[names[key]] = tensor


def write_state(tensor: Tensor) -> tuple:
    """Changes when a tensor is written or gets other memory; writes through `.data` do not change it."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr() if type(tensor) is nn.Parameter else 0


def read(w: QuantizedWeight) -> QuantizedWeight:
    """The weight as a call of operators reads it: w itself, or if w has hooks, a weight of what calling it
    returned. Hooks that offload or gather parameters provide them for the time of a module's call alone, and
    nothing else calls this module."""
    return _called(w) if why_altered(w) else w


@_disable_dynamo  # hooks run outside of graphs; torch.compiler.disable imports the compiler at once
def _called(w: QuantizedWeight) -> QuantizedWeight:
    found = w(as_stored=True)
    return _of_tensors(w, dict(zip(w._parameters, found, strict=True)))


def _of_tensors(w: QuantizedWeight, tensors: Mapping[str, Tensor | None]) -> QuantizedWeight:
    """A weight that is w but for its tensors, and without w's hooks."""
    other = object.__new__(QuantizedWeight)
    vars(other).update(vars(w) | vars(nn.Module()))
    vars(other).pop("forward", None)
    vars(other).pop("_compiled_call_impl", None)
    other._parameters = cast("dict[str, nn.Parameter | None]", tensors)
    return other


def check_weight(fn: str, name: str, w: QuantizedWeight, like_name: str = "", like: Tensor | None = None):
    """Checks that every tensor of a weight is there: on like's device, or else that of its codes, and of its
    shape. One that was not loaded is still on meta."""
    data, scale, zero = w._all()
    device = data.device if like is None else like.device
    if data.device != device or scale.device != device or (zero is not None and zero.device != device):
        _fail_device(fn, name, w, like_name, device)
    found = data.shape, scale.shape, None if zero is None else zero.shape
    is_compiling = torch.compiler.is_compiling()  # a graph would be compiled anew when _checked changes
    if not is_compiling and found == w._checked:
        return
    right = _right_shapes(w.format, w.shape, *found[:2])
    for key, shapes in zip(("data", "scale", "zero"), right, strict=True):
        tensor = w._of(key)
        if tensor is not None and tuple(tensor.shape) not in shapes:
            expected = f"{_full_name(name, w, key)} of shape {' or '.join(map(str, shapes))}"
            fail(ValueError, fn, expected, tuple(tensor.shape))
    if not is_compiling:
        w._checked = found


def _fail_device(fn: str, name: str, w: QuantizedWeight, like_name: str, device: torch.device) -> None:
    stored = {key: w._of(key) for key in FORMATS[w.format].names}
    devices = {key: tensor.device for key, tensor in stored.items() if tensor is not None}
    wrong = next(key for key, found in devices.items() if found != device)
    like_name = f"{like_name or _full_name(name, w, 'data')}'s device"
    if name and len(set(devices.values())) == 1:
        fail(ValueError, fn, f"{name} on {like_name} {device}", devices[wrong])
    fail(ValueError, fn, f"{_full_name(name, w, wrong)} on {like_name} {device}", devices[wrong])


def _full_name(name: str, w: QuantizedWeight, key: str) -> str:
    own = FORMATS[w.format].names[key]
    return f"{name}.{own}" if name else own


def _right_shapes(
    format: str, shape: tuple[int, ...], data: tuple[int, ...], scale: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], ...]:
    """The shapes that parameters of a weight (E, out, in) may have beside these."""
    named, scales = formats.named_shape(format, shape), formats.scale_shapes(format, shape)
    if tiles.fit(shape):
        tiled = tiles.parameter_shape(tiles.data_shape(format, shape), named)
        if tuple(data) == tiled:
            found = [tiles.parameter_shape(tiles.scale_shape(format, shape[1], s), s) for s in scales]
            return [tiled], found, [tuple(scale)]
    return [named], scales, [tuple(scale)]


def _dequantized(w: QuantizedWeight, dtype: torch.dtype | None = None) -> Tensor:
    check_weight(FN, "", w)
    w._copies.check()
    data, scale, zero = w._published("data"), w._published("scale"), w._published("zero")
    return formats.dequantize(w.format, data, scale, zero, dtype or w.dtype)


def _is_size(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _if_on(device: torch.device, tensor: AnyTensor | None) -> AnyTensor | None:
    """The tensor if it can be written there."""
    if tensor is None or tensor.device != device:
        return None
    return tensor if torch.is_inference_mode_enabled() or not tensor.is_inference() else None


def _applied(fn, tensor: Tensor) -> Tensor:
    """fn of a tensor's bytes, in the tensor's dtype."""
    if sharding.is_sharded(tensor):
        found = fn(tensor.detach())
        return found if found.dtype == tensor.dtype else tensor.detach().to(found.device)
    found = fn(tensor.detach().contiguous().view(torch.uint8))
    if found.dtype == torch.uint8:
        return found.view(tensor.dtype)
    return tensor.detach().to(found.device)  # .type(dtype) casts integers, too


@overload
def _frozen(tensor: Tensor) -> nn.Parameter: ...
@overload
def _frozen(tensor: Tensor | None) -> nn.Parameter | None: ...
def _frozen(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor.detach().contiguous(), requires_grad=False)


def _as_named(format: str, data: Tensor) -> Tensor:
    """The codes as the format's checkpoints have them."""
    rules = FORMATS[format]
    if rules.layout == "words":
        return data.contiguous().view(torch.int32)
    if rules.layout == "blocks":
        return data.unflatten(-1, (-1, rules.groups[0] // rules.per_byte))
    return data


def _codes(format: str, named: Tensor) -> Tensor:
    """The inverse of `_as_named`, a view."""
    layout = FORMATS[format].layout
    if layout == "words":
        return as_bytes(named)
    return named.flatten(-2) if layout == "blocks" else named


def as_bytes(words: Tensor) -> Tensor:
    """A view. TorchScript has no view of another dtype: to what torch.jit traces it is a constant."""
    if not torch.jit.is_tracing():
        return words.view(torch.uint8)
    with untraced():
        return words.view(torch.uint8)


@contextmanager
def untraced():
    """torch.jit records nothing here: what is made is a constant of its graph."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)


def _check_shape(name: str, tensor: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if tuple(tensor.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        fail(ValueError, FN, f"{name} of shape {expected}", tuple(tensor.shape))

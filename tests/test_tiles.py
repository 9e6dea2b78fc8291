"""Tiles: their layout, that no value changes on the way there and back, and what keeps which layout."""

import copy
import gc
import io
import itertools
import operator
import re
import weakref

import pytest
import torch
from cases import BF16, F16, F32, Calls, quantize_options
from hypothesis import given
from hypothesis import strategies as st
from test_quantized import EVERY_FORMAT, EVERY_OPTION, OPEN, OPTIONS, WITHIN, open_weight, random_weight
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import fused_moe
from fused_moe import FusedMoE, QuantizedWeight, quantize, reference
from fused_moe.quantized import formats, tiles
from fused_moe.quantized.formats import FORMATS

try:
    from fused_moe import _host
except ImportError:
    _host = None

SHAPES = ((2, 64, 64), (3, 192, 320), (1, 128, 384))


def drawn(*shape) -> torch.Tensor:
    """A weight in a dtype that has kernels of every format."""
    return torch.randn(shape, dtype=BF16)


def tiles_of(w: QuantizedWeight) -> tuple:
    """data, scale and zero of a published weight as tiles."""
    data, scale, zero = w.tensors
    return (
        tiles.tiled_data(w.format, data, w.shape),
        tiles.tiled_scale(w.format, scale, w.shape),
        None if zero is None else tiles.tiled_scale(w.format, zero, w.shape),
    )


def transposed_tiles_of(w: QuantizedWeight) -> tuple:
    """The second packing of data, scale and zero of a weight."""
    return (
        tiles.transposed_data(w.format, w.data, w.shape),
        tiles.transposed_scale(w.format, w.scale, w.shape),
        None if w.zero is None else tiles.transposed_scale(w.format, w.zero, w.shape),
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def assert_same(found: dict, expected: dict) -> None:
    """Two state_dicts: names, shapes, dtypes and bits."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


# --- the layout -------------------------------------------------------------------------------------------


@pytest.mark.quick
@EVERY_FORMAT
def test_codes_are_where_the_formula_says(cpu, format):
    """Every code of a weight, one after the other."""
    E, rows, cols = shape = (2, 128, 192)
    w = random_weight(format, *shape, cpu)
    is_packed = FORMATS[format].per_byte == 2
    codes = formats.nibbles(w.data) if is_packed else w.data.view(torch.uint8)
    tiled = tiles.tiled_data(format, w.data, shape)
    assert tiled.shape == (E, rows // 64, cols // 64, 2048 if is_packed else 4096)
    assert tiled.dtype == w.data.dtype
    found = tiled.view(torch.uint8).flatten().tolist()
    for e, i, j in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        row_warp, row_half, g = i % 64 // 16, i // 8 % 2, i % 8
        s, u, t, v = j % 64 // 16, j // 8 % 2, j % 8 // 2, j % 2
        lane = 4 * g + t
        tile = (e * (rows // 64) + i // 64) * (cols // 64) + j // 64
        if is_packed:
            nibble = 2 * (s % 2) + u + 4 * v
            byte = row_half * 1024 + row_warp * 256 + lane * 8 + s // 2 * 4 + nibble // 2
            code = found[2048 * tile + byte] >> nibble % 2 * 4 & 15
            if FORMATS[format].code == "e2m1":
                first = 2048 * tile + byte // 2 * 2  # of the halfword
                half, n = found[first] | found[first + 1] << 8, nibble % 4
                magnitude, sign = ((6, 15), (9, 13), (3, 12), (0, 14))[n]
                code = half >> magnitude & 7 | (half >> sign & 1) << 3
        else:
            code = found[4096 * tile + row_half * 2048 + row_warp * 512 + lane * 16 + s * 4 + 2 * u + v]
        assert code == codes[e, i, j], (e, i, j)


@pytest.mark.quick
@pytest.mark.skipif(_host is None, reason="fused_moe._host was not built for this Python")
@EVERY_FORMAT
def test_the_dequantising_kernel_finds_them(cpu, format):
    """csrc/quantized_tile.h, which the kernel and _host include, reads what tiles.py writes."""
    w = random_weight(format, 1, 64, 64, cpu)
    codes = formats.nibbles(w.data) if FORMATS[format].per_byte == 2 else w.data.view(torch.uint8)
    words = tiles.tiled_data(format, w.data, w.shape).flatten().view(torch.uint8).view(torch.int32)
    found = _host.tile_codes(w.code, [word & 0xFFFFFFFF for word in words.tolist()])
    # Not as lists: pytest takes minutes to describe how they differ.
    assert torch.equal(torch.tensor(found, dtype=codes.dtype), codes.flatten())


@EVERY_FORMAT
@pytest.mark.parametrize("scale_of", range(6))
def test_scales_are_where_the_formula_says(cpu, format, scale_of):
    """Scales and zero points of every kind, also where the last block of 128 x 128 is cut."""
    E, rows, cols = shape = (2, 192, 320 if scale_of < 3 else 384)
    w = random_weight(format, *shape, cpu, scale_of)
    keeps_dtype = FORMATS[format].per_byte == 2
    _, *tiled = tiles_of(w)
    for name, found, scale in zip(("scale", "zero"), tiled, (w.scale, w.zero), strict=True):
        if scale is None:
            assert found is None
            continue
        by_row = scale.size(1) == rows
        assert found.shape == (E, rows // 64, scale.size(2), 64 if by_row else 4), name
        assert found.dtype == (scale.dtype if keeps_dtype else F32), name
        for e, i, c in torch.cartesian_prod(*map(torch.arange, (E, rows, scale.size(2)))).tolist():
            row = i if by_row else i // 128 if FORMATS[format].block == "square_128" else 0
            copies = found[e, i // 64, c, i % 64] if by_row else found[e, i // 64, c]
            assert (copies == scale[e, row, c]).all(), (name, e, i, c)


@given(
    format=st.sampled_from(sorted(FORMATS)),
    num_experts=st.integers(1, 3),
    row_tiles=st.integers(1, 5),
    col_tiles=st.integers(1, 5),
    scale_of=st.integers(0, 5),
    dtype=st.sampled_from((F32, BF16, F16)),
    part=st.sampled_from((1, 1 << 13, 1 << 22)),
)
def test_there_and_back(cpu, format, num_experts, row_tiles, col_tiles, scale_of, dtype, part):
    """Bits of codes, scales and zero points, however many experts are converted at a time."""
    w = random_weight(format, num_experts, 64 * row_tiles, 64 * col_tiles, cpu, scale_of)
    scale = w.scale if len(FORMATS[format].scale_dtypes) == 1 else w.scale.to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "PART", part)
        data, tiled_scale, tiled_zero = tiles_of(
            QuantizedWeight(w.data, scale, w.zero, format=format, shape=w.shape)
        )
        assert torch.equal(bits(tiles.published_data(format, data)), bits(w.data))
    found = tiles.published_scale(format, tiled_scale, scale.dtype)
    assert found.dtype == scale.dtype and torch.equal(found, scale)
    if w.zero is not None:
        assert torch.equal(tiles.published_scale(format, tiled_zero, torch.int8), w.zero)


# --- the second packing -----------------------------------------------------------------------------------


@pytest.mark.quick
@EVERY_FORMAT
@pytest.mark.parametrize("part", (1, 1 << 22))
def test_transposed_codes_are_tiles_of_the_transposed_weight(cpu, monkeypatch, format, part):
    """Every code of the weight, read back from the layout of tiles, which the tests above check."""
    monkeypatch.setattr(formats, "PART", part)
    E, rows, cols = shape = (3, 128, 192)
    w = random_weight(format, *shape, cpu)
    is_packed = FORMATS[format].per_byte == 2
    found = tiles.transposed_data(format, w.data, shape)
    assert found.shape == (E, cols // 64, rows // 64, 2048 if is_packed else 4096)
    assert found.dtype == w.data.dtype and found.is_contiguous()
    codes = [bits(t) for t in (tiles.published_data(format, found), w.data)]
    transposed, codes = map(formats.nibbles, codes) if is_packed else codes
    assert transposed.shape == (E, cols, rows) and torch.equal(transposed, codes.mT)


@EVERY_FORMAT
@pytest.mark.parametrize("scale_of", range(6))
def test_transposed_scales_are_where_the_formula_says(cpu, format, scale_of):
    """Scales and zero points of every kind, also where the last block of 128 x 128 is cut."""
    E, rows, cols = shape = (2, 192, 320 if scale_of < 3 else 384)
    w = random_weight(format, *shape, cpu, scale_of)
    _, *found_of = transposed_tiles_of(w)
    for name, found, scale in zip(("scale", "zero"), found_of, (w.scale, w.zero), strict=True):
        if scale is None:
            assert found is None
            continue
        assert found.dtype == (scale.dtype if FORMATS[format].per_byte == 2 else F32), name
        assert found.is_contiguous()
        if scale.size(1) == rows:
            groups = scale.size(2)
            assert found.shape == (E, groups, rows // 64, 64), name
            for e, i, c in torch.cartesian_prod(*map(torch.arange, (E, rows, groups))).tolist():
                s, u, t, v = i % 64 // 16, i // 8 % 2, i % 8 // 2, i % 2
                assert found[e, c, i // 64, 16 * t + 4 * s + 2 * u + v] == scale[e, i, c], (name, e, i, c)
            continue
        blocks = scale.size(1)
        assert found.shape == (E, cols // 64, blocks, 4)
        for e, j, r in torch.cartesian_prod(*map(torch.arange, (E, cols // 64, blocks))).tolist():
            col = j // 2 if FORMATS[format].block == "square_128" else 0
            assert (found[e, j, r] == scale[e, r, col]).all(), (e, j, r)


def values_of_second_packing(w: QuantizedWeight) -> torch.Tensor:
    """The weight in float32, by the codes and scales of its second packing."""
    E, rows, cols = w.shape
    data_t, *of_rows = transposed_tiles_of(w)
    codes = tiles.published_data(w.format, data_t)
    if FORMATS[w.format].per_byte == 2:
        codes = formats.pack_nibbles(formats.nibbles(codes).mT)
    else:
        codes = bits(codes).mT.contiguous().view(w.data.dtype)
    if of_rows[0].size(3) == 4:
        scale = tiles.published_scale(w.format, of_rows[0], w.scale.dtype)
        return formats.dequantize(w.format, codes, scale.mT, None, F32)
    row = torch.arange(64)
    lane_order = 16 * (row % 8 // 2) + 4 * (row // 16) + 2 * (row // 8 % 2) + row % 2
    scale, zero = (t if t is None else t[..., lane_order].flatten(2).mT for t in of_rows)
    return formats.dequantize(w.format, codes, scale, zero, F32)


@EVERY_FORMAT
@pytest.mark.parametrize("scale_of", range(6))
def test_the_second_packing_has_the_same_values(cpu, format, scale_of):
    w = random_weight(format, 2, 128, 384, cpu, scale_of)
    assert torch.equal(values_of_second_packing(w), w.dequantize(F32))


@EVERY_FORMAT
@pytest.mark.parametrize("scale_of", range(4))
def test_the_second_packing_is_written_in_place(cpu, format, scale_of):
    shape = (2, 64, 128)
    expected = transposed_tiles_of(random_weight(format, *shape, cpu, scale_of))
    w = random_weight(format, *shape, cpu, scale_of)
    converts = tiles.transposed_data, tiles.transposed_scale, tiles.transposed_scale
    for convert, out, tensor in zip(converts, expected, (w.data, w.scale, w.zero), strict=True):
        if tensor is not None:
            other = convert(format, tensor, shape)
            assert not torch.equal(bits(out), bits(other))
            assert convert(format, tensor, shape, out) is out
            assert torch.equal(bits(out), bits(other))


@EVERY_FORMAT
def test_temporaries_are_small(cpu, monkeypatch, format):
    """Nothing but the result is larger than the experts that are converted at a time."""
    E, rows, cols = shape = (16, 64, 128)
    monkeypatch.setattr(formats, "PART", rows * cols)
    data = random_weight(format, *shape, cpu).data
    tiled = tiles.tiled_data(format, data, shape)
    for convert, source in (
        (lambda: tiles.tiled_data(format, data, shape), data),
        (lambda: tiles.published_data(format, tiled), tiled),
        (lambda: tiles.transposed_data(format, data, shape), data),
    ):
        with Calls() as calls:
            out = convert()
        kept = {t.untyped_storage().data_ptr() for t in (source, out)}
        made = [t for _, _, result in calls.calls for t in tree_leaves(result)]
        sizes = [t.untyped_storage().nbytes() for t in made if t.untyped_storage().data_ptr() not in kept]
        assert 0 < max(sizes) <= 2 * rows * cols


# --- which weights are kept in tiles ----------------------------------------------------------------------


def wanted(device, shape, format="fp8_block", dtype=BF16, scale_dtype=F32) -> bool:
    return tiles.are_wanted(device, shape, format, dtype, scale_dtype)


@pytest.mark.quick
@pytest.mark.usefixtures("tiling")
@EVERY_FORMAT
def test_tiles_are_for_dtypes_that_have_kernels(cpu, format):
    """All but fp16, which has kernels of int4 with scales of fp16."""
    for dtype, scale_dtype in itertools.product((F32, BF16, F16), repeat=2):
        expected = dtype != F16 or (format == "int4" and scale_dtype == F16)
        assert wanted(cpu, (2, 64, 128), format, dtype, scale_dtype) == expected, (dtype, scale_dtype)


@pytest.mark.quick
def test_tiles_are_for_compute_capability_9(cpu, monkeypatch):
    """On such GPUs alone, where both sides are multiples of 64, and not for the sm80 kernels."""
    device = torch.device("cuda", 0)
    monkeypatch.delenv("FUSED_MOE_TIER", raising=False)
    assert not wanted(cpu, (2, 64, 64))
    monkeypatch.setattr(tiles, "HAS_CUDA_KERNELS", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert wanted(device, (2, 64, 128)) == (capability[0] == 9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for shape, fits in (
        ((1, 64, 64), True),
        ((1, 96, 64), False),
        ((1, 64, 96), False),
        ((3, 192, 320), True),
    ):
        assert wanted(device, shape) == fits
    assert not wanted(cpu, (2, 64, 64))
    assert not wanted(torch.device("meta"), (2, 64, 64))
    monkeypatch.setenv("FUSED_MOE_TIER", "portable")
    assert not wanted(device, (2, 64, 64))
    monkeypatch.delenv("FUSED_MOE_TIER")
    monkeypatch.setattr(tiles, "HAS_CUDA_KERNELS", False)
    assert not wanted(device, (2, 64, 64))


@pytest.mark.quick(one_in=7)
@EVERY_FORMAT
@pytest.mark.parametrize("scale_of", range(4))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tiled_weight_is_the_published_one(cpu, request, format, scale_of, shape):
    """Its values, properties and state_dict; operators get its tiles."""
    published = random_weight(format, *shape, cpu, scale_of)
    assert not published.is_tiled
    request.getfixturevalue("tiling")
    w = copy.deepcopy(published)  # made anew, so it is tiled
    assert w.is_tiled and w.shape == shape
    for name in ("data", "scale", "zero"):
        found, expected = getattr(w, name), getattr(published, name)
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(bits(found), bits(expected))
        assert found is None or (found.shape == expected.shape and found.dtype == expected.dtype)
    for stored, expected in zip(w.tensors, tiles_of(published), strict=True):
        assert (stored is None) == (expected is None)
        assert stored is None or torch.equal(bits(stored), bits(expected))
    assert torch.equal(w.dequantize(BF16), published.dequantize(BF16))
    assert torch.equal(reference.dequantize(w, F32), reference.dequantize(published, F32))
    assert_same(w.state_dict(), published.state_dict())
    assert repr(w) == repr(published) and w.device == cpu
    assert not any(p.requires_grad for p in w.parameters())
    assert [n for n, _ in w.named_parameters()] == [n for n, _ in published.named_parameters()]


@pytest.mark.usefixtures("tiling")
def test_what_does_not_fit_stays_published(cpu):
    """A side that is no multiple of 64."""
    for shape in ((2, 96, 64), (2, 64, 96), (2, 130, 288)):
        w = random_weight("mxfp4" if shape[2] % 32 == 0 else "fp8", *shape, cpu)
        assert not w.is_tiled and all(t.dim() == 3 for t in w.tensors if t is not None)


@EVERY_OPTION
def test_moves(cpu, option):
    """Into tiles and out of them, as `.to(device)` between GPU and CPU; copies; pickles; and dtypes."""
    format, options = OPTIONS[option]
    w = quantize(drawn(2, 64, 128), format, **options)
    expected = copy.deepcopy(w).state_dict()
    with pytest.MonkeyPatch.context() as gpu:
        gpu.setattr(tiles, "are_read_on", lambda device: device.type == "cpu")
        assert w.to(cpu) is w and w.is_tiled
        stored = [t if t is None else t.clone() for t in w.tensors]
        for change in (lambda w: w.to(F32), lambda w: w.float(), lambda w: w.type(F32)):
            assert change(w.to(BF16)).is_tiled and w.dtype == F32
        for tensor, before in zip(w.tensors, stored, strict=True):
            assert tensor is before is None or torch.equal(bits(tensor), bits(before))
        copied, meta = copy.deepcopy(w), copy.deepcopy(w).to("meta")
        assert copied.is_tiled and not meta.is_tiled
        assert [(n, t.shape, t.dtype) for n, t in meta.state_dict().items()] == [
            (n, t.shape, t.dtype) for n, t in expected.items()
        ]
        file = io.BytesIO()
        torch.save(w, file)
        file.seek(0)
        assert torch.load(file, weights_only=False).is_tiled
    file.seek(0)
    loaded = torch.load(file, weights_only=False)  # as with map_location="cpu"
    for moved in (w.to(cpu), copied.cpu(), loaded):
        assert not moved.is_tiled
        assert_same(moved.state_dict(), expected)


@pytest.mark.usefixtures("tiling")
@EVERY_OPTION
def test_another_dtype(cpu, option):
    """`.half()` takes a weight out of tiles that have no kernels for fp16, and back; no bit changes."""
    format, options = OPTIONS[option]
    w = quantize(drawn(2, 64, 128), format, trainable=True, **options)
    expected = copy.deepcopy(w).state_dict()
    assert_packed(w)
    assert not w.half().is_tiled
    assert_not_packed(w)
    assert_same(w.state_dict(), expected)
    assert_packed(w.bfloat16())
    assert_same(w.state_dict(), expected)


# --- which weights have the second packing ----------------------------------------------------------------


def assert_packed(w: QuantizedWeight) -> None:
    """It has the second packing of its codes."""
    for found, expected in zip(w.transposed_tensors, transposed_tiles_of(w), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or (found.dtype == expected.dtype and found.device == w.device)
        assert found is None or torch.equal(bits(found), bits(expected))


def assert_not_packed(w: QuantizedWeight) -> None:
    assert w.transposed_tensors == (w.data_t, w.scale_t, w.zero_t) == (None, None, None)


class Transposed(torch.nn.Module):
    """A weight's second packing as an output."""

    def __init__(self, w: QuantizedWeight):
        super().__init__()
        self.w = w

    def forward(self) -> tuple:
        return self.w.transposed_tensors


@pytest.mark.quick
@EVERY_OPTION
def test_who_has_the_second_packing(cpu, request, option):
    """Tiled weights that were asked for it, by any of three ways."""
    format, options = OPTIONS[option]
    weight = drawn(2, 64, 128)
    published = quantize(weight, format, trainable=True, **options)
    assert published.is_trainable and not published.is_tiled
    assert_not_packed(published)
    request.getfixturevalue("tiling")
    plain = quantize(weight, format, **options)
    assert not plain.is_trainable and "trainable" not in repr(plain)
    assert_not_packed(plain)
    w = quantize(weight, format, trainable=True, **options)
    assert w.is_trainable and repr(w) == repr(plain)[:-1] + ", trainable=True)"
    assert_packed(w)
    assert w.nbytes == plain.nbytes + sum(t.nbytes for t in w.transposed_tensors if t is not None)
    assert 1.9 * plain.nbytes <= w.nbytes <= 2.1 * plain.nbytes
    assert not list(w.buffers()) and not any(t.requires_grad for t in w.transposed_tensors if t is not None)
    assert_same(w.state_dict(), plain.state_dict())
    made = QuantizedWeight(plain.data, plain.scale, plain.zero, format=format, shape=w.shape, trainable=True)
    assert_packed(made)
    assert plain.set_trainable() is plain and plain.is_trainable
    assert_packed(plain)
    places = [t.data_ptr() for t in plain.transposed_tensors if t is not None]
    plain.set_trainable(True)
    assert [t.data_ptr() for t in plain.transposed_tensors if t is not None] == places
    assert_not_packed(plain.set_trainable(False))
    assert not plain.is_trainable and plain.is_tiled
    assert_packed(published.to(cpu))  # as moved to such a GPU


@pytest.mark.usefixtures("tiling")
def test_layers_with_the_second_packing(cpu):
    """quantize of a module; sides that tiles do not fit; published tensors in place of tiles."""
    moe = quantize(FusedMoE(64, 96, 4, 2), "mxfp4", trainable=True)
    assert moe.experts.w1.is_trainable and not moe.experts.w1.is_tiled  # (4, 96, 64)
    assert_not_packed(moe.experts.w1)
    w = quantize(FusedMoE(64, 128, 4, 2), "mxfp4", trainable=True).experts.w1

    assert Transposed(w)() == w.transposed_tensors
    state = {f"w.{name}": tensor for name, tensor in w.state_dict().items()}
    assert torch.func.functional_call(Transposed(w), state, ()) == (None, None, None)


@EVERY_OPTION
def test_the_second_packing_moves(cpu, option):
    """As tiles do: made on a GPU that reads it, kept there, dropped elsewhere, with copies and pickles."""
    format, options = OPTIONS[option]
    w = quantize(drawn(2, 64, 128), format, trainable=True, **options)
    with pytest.MonkeyPatch.context() as gpu:
        gpu.setattr(tiles, "are_read_on", lambda device: device.type == "cpu")
        assert_packed(w.to(cpu))
        places = [t.data_ptr() for t in w.transposed_tensors if t is not None]
        for change in (lambda w: w.to(F32), lambda w: w.float(), lambda w: w.type(F32)):
            assert_packed(change(w.to(BF16)))
        assert [t.data_ptr() for t in w.transposed_tensors if t is not None] == places
        copied = copy.deepcopy(w)
        assert_packed(copied)
        assert copied.data_t.data_ptr() != w.data_t.data_ptr()
        meta = copy.deepcopy(w).to("meta")
        assert meta.is_trainable
        assert_not_packed(meta)
        meta.to_empty(device=cpu).load_state_dict(w.state_dict())
        assert_packed(meta)
        file = io.BytesIO()
        torch.save(w, file)
        file.seek(0)
        assert_packed(torch.load(file, weights_only=False))
    file.seek(0)
    loaded = torch.load(file, weights_only=False)  # as with map_location="cpu"
    for moved in (w.to(cpu), copied.cpu(), loaded):
        assert moved.is_trainable and not moved.is_tiled
        assert_not_packed(moved)


@EVERY_OPTION
def test_writing_tiles_writes_the_second_packing(cpu, option, request):
    """In place, as DistributedDataParallel writes the first rank's parameters; also before it is moved or
    copied. Compiled code takes it as it is."""
    format, options = OPTIONS[option]
    request.getfixturevalue("tiling")
    w, *others = (quantize(drawn(2, 64, 128), format, trainable=True, **options) for _ in range(5))
    places = [t.data_ptr() for t in w.transposed_tensors if t is not None]
    changes = (lambda w: w, lambda w: w.to(F32), copy.deepcopy)
    for other, change in zip(others[:3], changes, strict=True):
        for own, new in zip(w.parameters(), other.parameters(), strict=True):
            own.detach().copy_(new)
        assert_packed(change(w))
        assert_same(w.state_dict(), other.state_dict())
        assert [t.data_ptr() for t in w.transposed_tensors if t is not None] == places
    # Other tiles in their place have no packing here.
    tensors = dict(others[3].named_parameters())
    packing = torch.func.functional_call(Transposed(w), {f"w.{n}": t for n, t in tensors.items()}, ())
    assert packing == (None, None, None)
    assert_packed(w)
    compiled = torch.compile(Transposed(w), backend="eager", fullgraph=True)()
    assert all(t is own for t, own in zip(compiled, w.transposed_tensors, strict=True))


@EVERY_OPTION
def test_loading_writes_the_second_packing(cpu, option):
    """In place, since a CUDA graph may read it; and of a weight that was on meta."""
    format, options = OPTIONS[option]
    state = quantize(drawn(2, 64, 128), format, **options).state_dict()
    with pytest.MonkeyPatch.context() as gpu:
        gpu.setattr(tiles, "are_read_on", lambda device: device.type != "meta")
        w = quantize(drawn(2, 64, 128), format, trainable=True, **options)
        before = w.transposed_tensors
        for assign in (False, True):
            w.load_state_dict(quantize(drawn(2, 64, 128), format, **options).state_dict())
            w.load_state_dict(state, assign=assign)
            # A graph asks for no tensors, so that they are already written.
            for written, expected in zip(before, transposed_tiles_of(w), strict=True):
                if expected is not None:
                    assert torch.equal(bits(written), bits(expected))
            assert all(t is b for t, b in zip(w.transposed_tensors, before, strict=True))
            assert_same(w.state_dict(), state)
            assert_packed(w)
        meta = quantize(torch.empty(2, 64, 128, dtype=BF16, device="meta"), format, trainable=True, **options)
        assert_not_packed(meta)
        meta.load_state_dict(state, assign=True)
        assert_packed(meta)
        # tensors that are where tiles are not read
        gpu.setattr(tiles, "are_read_on", lambda device: False)
        w.load_state_dict(state, assign=True)
        assert not w.is_tiled
        assert_not_packed(w)


@pytest.mark.quick
@EVERY_OPTION
@pytest.mark.usefixtures("tiling")
def test_refresh_weights(cpu, option):
    """Writes that no version tells, into tiles; in place, as a CUDA graph needs it, and in inference mode."""
    format, options = OPTIONS[option]
    moe, *others = (
        quantize(FusedMoE(64, 128, 4, 2, dtype=BF16), format, trainable=True, **options) for _ in range(4)
    )
    weights = {name: getattr(moe.experts, name) for name in ("w1", "w2", "w3")}
    places = [t.data_ptr() for w in weights.values() for t in w.transposed_tensors if t is not None]

    def write(other, copy):
        for own, new in zip(moe.experts.parameters(), other.experts.parameters(), strict=True):
            copy(own, new)

    def assert_written(other):
        for name, w in weights.items():
            assert_packed(w)
            assert_same(w.state_dict(), getattr(other.experts, name).state_dict())
        assert [
            t.data_ptr() for w in weights.values() for t in w.transposed_tensors if t is not None
        ] == places

    write(others[0], lambda own, new: own.data.copy_(new))
    assert fused_moe.refresh_weights(moe) is None
    assert_written(others[0])
    with torch.inference_mode():
        write(others[1], torch.Tensor.copy_)
        fused_moe.refresh_weights(torch.nn.Sequential(moe))
    assert_written(others[1])
    with torch.no_grad():
        write(others[2], torch.Tensor.copy_)
    assert_written(others[2])  # by version


@pytest.mark.usefixtures("tiling")
def test_weights_made_in_inference_mode_are_refreshed(cpu):
    """They have no versions."""
    with torch.inference_mode():
        w, other = (quantize(drawn(2, 64, 128), "int4", trainable=True) for _ in range(2))
        for own, new in zip(w.parameters(), other.parameters(), strict=True):
            own.copy_(new)
        fused_moe.refresh_weights(w)
        assert_packed(w)
    for copied in (w, copy.deepcopy(w)):
        fused_moe.refresh_weights(copied)
        assert_packed(copied)


@EVERY_OPTION
def test_tiles_in_other_memory(cpu, option, request):
    """Parameters whose memory was replaced through `.data`, which moves no version."""
    format, options = OPTIONS[option]
    request.getfixturevalue("tiling")
    w, other = (quantize(drawn(2, 64, 128), format, trainable=True, **options) for _ in range(2))
    for own, new in zip(w.parameters(), other.parameters(), strict=True):
        own.data = new.detach().clone()
    assert_packed(w)
    assert_same(w.state_dict(), other.state_dict())


def test_what_refresh_weights_takes(cpu):
    """Any module; one without weights of ours is left alone."""
    assert fused_moe.refresh_weights(torch.nn.Linear(2, 2)) is None
    for wrong in (torch.zeros(2), None, FusedMoE):
        with pytest.raises(TypeError, match="refresh_weights: expected module to be an nn.Module, found "):
            fused_moe.refresh_weights(wrong)


@pytest.mark.gpu
@EVERY_OPTION
def test_moving_to_the_cpu_frees_the_devices_memory(device, option):
    """The memory of tiles and of the second packing."""
    format, options = OPTIONS[option]

    def trained() -> FusedMoE:
        moe = quantize(FusedMoE(256, 512, 8, 2, device=device, dtype=BF16), format, trainable=True, **options)
        moe(torch.randn(5, 256, device=device, dtype=BF16)).sum().backward()
        moe.zero_grad()
        return moe

    trained()  # libraries' workspaces stay
    gc.collect()
    before = torch.cuda.memory_allocated()
    moe = trained()
    assert torch.cuda.memory_allocated() >= before + sum(w.nbytes for w in moe.experts.weights)
    moe.to("cpu")
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


@EVERY_OPTION
def test_nothing_holds_tiles_that_were_moved(cpu, tiling, option):
    """The tiles and the second packing of a weight that has left its device are freed, without a GPU, too."""
    format, options = OPTIONS[option]
    w = quantize(drawn(2, 128, 256), format, trainable=True, **options)
    assert w.is_tiled and w.transposed_tensors[0] is not None
    held = [weakref.ref(t) for t in (*w.parameters(), *w.transposed_tensors) if t is not None]
    w.to("meta")
    gc.collect()
    assert not any(ref() is not None for ref in held)


@EVERY_OPTION
def test_training_has_the_same_bits(cpu, option):
    """With trainable=True, where it has no effect."""
    format, options = OPTIONS[option]
    moe = FusedMoE(64, 128, 4, 2, dtype=BF16)
    x = torch.randn(33, 64, dtype=BF16)
    results = []
    for trainable in (False, True):
        layer = quantize(copy.deepcopy(moe), format, trainable=trainable, **options)
        assert layer.experts.w2.is_trainable == trainable
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.square().sum().backward()
        results.append((out, leaf.grad, layer.router.gate.weight.grad))
    for plain, found in zip(*results, strict=True):
        assert torch.equal(found, plain)


@pytest.mark.quick
def test_what_trainable_may_be(cpu):
    w = quantize(torch.randn(1, 64, 64), "fp8")
    for call, caller in (
        (lambda: quantize(torch.randn(1, 64, 64), "fp8", trainable=1), "quantize"),
        (lambda: QuantizedWeight(w.data, w.scale, format="fp8", shape=w.shape, trainable=None), "Quant.*"),
        (lambda: w.set_trainable("yes"), "QuantizedWeight.set_trainable"),
    ):
        with pytest.raises(TypeError, match=f"{caller}: expected trainable to be True or False, found "):
            call()


# --- the state_dict ---------------------------------------------------------------------------------------


def layer(option: str) -> FusedMoE:
    format, options = OPTIONS[option]
    return quantize(FusedMoE(64, 128, 4, 2, dtype=BF16), format, **options)


@EVERY_OPTION
def test_state_dict(cpu, option):
    """It is published, and loads into tiles, whose memory stays where it was, and from tiles."""
    published, x = layer(option).requires_grad_(False), torch.randn(5, 64, dtype=BF16)
    state, expected = published.state_dict(), published(x)
    with pytest.MonkeyPatch.context() as gpu:
        gpu.setattr(tiles, "are_read_on", lambda device: device.type != "meta")
        moe = layer(option)
        places = {name: p.data_ptr() for name, p in moe.named_parameters()}
        assert moe.experts.w1.is_tiled and moe.experts.w2.is_tiled and moe.experts.w3.is_tiled
        moe.load_state_dict(state)
        assert moe.experts.w1.is_tiled and {n: p.data_ptr() for n, p in moe.named_parameters()} == places
        assert_same(moe.state_dict(), state)
        assert_same(get_model_state_dict(moe), state)
        assert_same(moe.state_dict(keep_vars=True), state)
        # Published tensors in place of tiles are right anywhere.
        assert torch.equal(torch.func.functional_call(moe, state, x), expected)
        with torch.device("meta"):
            meta = layer(option)
        assert not meta.experts.w1.is_tiled
        meta.load_state_dict(state, assign=True)
        assert meta.experts.w1.is_tiled
        assert_same(meta.state_dict(), state)
        saved = moe.state_dict()
    other = layer(option)
    other.load_state_dict(saved)
    assert not other.experts.w1.is_tiled
    assert torch.equal(other.requires_grad_(False)(x), expected)


@pytest.mark.quick(one_in=7)
@pytest.mark.usefixtures("tiling")
@EVERY_FORMAT
@pytest.mark.parametrize("scale_of", range(4))
@pytest.mark.parametrize("shape", ((1, 64, 64), (2, 128, 64), (8, 512, 512), (1, 64, 4096)), ids=str)
def test_published_tensors_are_not_written_into_tiles(cpu, format, scale_of, shape):
    """By their names, as weight sync does: of all experts, of one, and of shapes that could be broadcast."""
    w = random_weight(format, *shape, cpu, scale_of)
    before = {name: tensor.clone() for name, tensor in w.state_dict().items()}
    other = random_weight(format, *shape, cpu, scale_of).state_dict()
    assert w.is_tiled and [n for n, _ in w.named_parameters()] == list(other)
    for name, parameter in w.named_parameters():
        for target, source in ((parameter, other[name]), (parameter[0], other[name][0])):
            for write in (
                torch.Tensor.copy_,
                lambda t, new: t.data.copy_(new),
                lambda t, new: t[:].copy_(new),
            ):
                with pytest.raises(
                    RuntimeError, match="doesn't match the broadcast shape|must match the size"
                ):
                    write(target, source)
    assert_same(w.state_dict(), before)
    w.load_state_dict(dict(list(other.items())[:1]), strict=False)  # a part of the names
    w.load_state_dict(dict(list(other.items())[1:]), strict=False)
    assert_same(w.state_dict(), other)


@pytest.mark.quick
@pytest.mark.usefixtures("tiling")
@EVERY_OPTION
def test_a_write_into_a_copy_of_tiles_is_an_error(cpu, option):
    """Where it would write the parameters of a weight that is not tiled; until it is loaded."""
    format, options = OPTIONS[option]
    w, other = (quantize(drawn(2, 64, 128), format, **options) for _ in range(2))
    new = other.state_dict()
    codes, scale = list(new)[:2]
    gives = [(name, operator.itemgetter(name), keep) for name in new for keep in (False, True)]
    copies = [
        (name, lambda get=get, keep=keep: get(w.state_dict(keep_vars=keep))) for name, get, keep in gives
    ]
    copies += [(codes, lambda: w.data), (scale, lambda: w.scale)]
    uses = (
        lambda: w.tensors, lambda: w.dequantize(), lambda: w.data, lambda: w.scale, lambda: w.zero,
        lambda: w.state_dict(), lambda: copy.deepcopy(w), lambda: torch.save(w, io.BytesIO()),
    )  # fmt: skip
    for name, give in copies:
        assert torch.equal(bits(give().clone()), bits(give())) and w.tensors  # reading is none
        given = give()
        for dies in (True, False):
            bits(give() if dies else given)[0].zero_()
            for use in uses:
                expected = (
                    f"{name} of a weight in tiles to be written by load_state_dict, found a write into a"
                )
                with pytest.raises(ValueError, match=f"QuantizedWeight: expected {expected} copy"):
                    use()
            w.load_state_dict(new)
            assert w.tensors
            assert_same(w.state_dict(), new)


@pytest.mark.usefixtures("tiling")
def test_a_copy_that_is_loaded(cpu):
    """torch.distributed.checkpoint writes into a state_dict, which is then loaded."""
    w, other = (quantize(drawn(2, 64, 128), "int8") for _ in range(2))
    state, new = w.state_dict(), other.state_dict()
    for name, tensor in state.items():
        tensor.copy_(new[name])
    with pytest.raises(ValueError, match="expected weight of a weight in tiles"):
        w.dequantize()
    w.load_state_dict(state)
    assert_same(w.state_dict(), new)
    for read in (lambda: w.tensors, lambda: (w.data, w.scale), lambda: (w.dequantize(),)):
        compiled = torch.compile(read, backend="eager", fullgraph=True)()
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(compiled[:2], read()[:2], strict=True))


@pytest.mark.usefixtures("tiling")
def test_what_does_not_load(cpu):
    """The messages are those of a published weight. What is right is loaded, the rest stays as it was."""
    w = random_weight("int4", 2, 64, 128, cpu, scale_of=3)
    before, given = w.state_dict(), random_weight("int4", 2, 64, 128, cpu, scale_of=3).state_dict()
    for name, wrong, message in (
        ("weight_scale", None, 'Missing key.*"weight_scale"'),
        ("weight_scale", given["weight_scale"][:, :32], "size mismatch for weight_scale"),
        (
            "weight_scale",
            given["weight_scale"].double(),
            "weight_scale: expected dtype .*, found torch.float64",
        ),
        ("weight_zero_point", given["weight_zero_point"] + 16, "weight_zero_point: .*expected zero from -8"),
    ):
        state = {**given, name: wrong}
        if wrong is None:
            del state[name]
        w.load_state_dict(before)
        with pytest.raises(RuntimeError, match=message):
            w.load_state_dict(state)
        assert w.is_tiled
        assert_same(w.state_dict(), {**given, name: before[name]})


@pytest.mark.parametrize("assign", (False, True), ids=("copied", "assigned"))
@pytest.mark.parametrize("format", OPEN)
@pytest.mark.usefixtures("tiling")
def test_tiles_of_another_kind(cpu, format, assign):
    """Scales of another dtype or number, and zero points, come with a state_dict. Tiles, and the second
    packing, that are as large as before stay where they are."""
    for first, second in (pair for name, *pair in WITHIN if name == format):
        w, other = (open_weight(cpu, format, k, (2, 64, 128)) for k in (first, second))
        w.set_trainable()
        before, packed = dict(w.named_parameters()), w.data_t
        w.load_state_dict(other.state_dict(), assign=assign)
        assert w.is_tiled
        assert_same(w.state_dict(), other.state_dict())
        assert_packed(w)
        for name, parameter in w.named_parameters():
            same = name in before and (parameter.shape, parameter.dtype) == (
                before[name].shape,
                before[name].dtype,
            )
            assert (parameter is before.get(name)) == same
        if all(p is before.get(n) for n, p in w.named_parameters()):
            assert w.data_t is packed


@pytest.mark.gpu
def test_a_state_that_differs_is_refused_under_capture(device):
    """A graph would go on reading the replaced scale."""
    own, other = (
        open_weight(device, "int8", (F32, {"per_tensor": one}), (2, 64, 128)) for one in (False, True)
    )
    x, offsets = torch.randn(6, 128, device=device), torch.tensor([2, 6], dtype=torch.int32, device=device)
    torch.ops.fused_moe.quantized_mm(x, *own.tensors, offsets, own.code)
    torch.cuda.synchronize()
    message = (
        r"weight_scale as the parameter is while a CUDA graph is captured, one of shape \(2, 64, 1\).* one"
    )
    with pytest.raises(ValueError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        own.load_state_dict(other.state_dict())


@pytest.mark.quick
@EVERY_OPTION
def test_loading_in_parts(cpu, option):
    """A tensor after the other, as from several files, in any order; it is arranged when all are loaded."""
    format, options = OPTIONS[option]
    state = quantize(drawn(2, 64, 128), format, **options).state_dict()
    with pytest.MonkeyPatch.context() as gpu:
        gpu.setattr(tiles, "are_read_on", lambda device: device.type != "meta")
        for names in itertools.permutations(state):
            w = quantize(torch.empty(2, 64, 128, dtype=BF16, device="meta"), format, **options)
            for name in names:
                assert not w.is_tiled
                w.load_state_dict({name: state[name]}, assign=True, strict=False)
                if name != names[-1]:
                    with pytest.raises(ValueError, match="expected .* on .*, found (meta|cpu)"):
                        w.dequantize()
            assert w.is_tiled
            assert_same(w.state_dict(), state)


@pytest.mark.quick
@pytest.mark.usefixtures("tiling")
@EVERY_OPTION
@pytest.mark.parametrize("shape", ((2, 64, 128), (8, 512, 512)), ids=str)
def test_tiles_that_do_not_fit(cpu, option, shape):
    """A tensor of a weight in tiles that is on meta, or of another shape."""
    format, options = OPTIONS[option]
    w = quantize(drawn(*shape), format, **options)
    w.dequantize()
    for name, parameter in w.named_parameters():
        values = parameter.data
        for wrong in (values[:-1], values.new_empty(0), values.unsqueeze(1), values[..., :-1]):
            parameter.data = wrong
            found = re.escape(str(tuple(wrong.shape)))
            with pytest.raises(ValueError, match=rf"expected {name} of shape \(.*, found {found}"):
                w.dequantize()
        w._parameters[name] = parameter.to("meta")
        with pytest.raises(ValueError, match="expected .*'s device (meta|cpu), found (meta|cpu)"):
            w.dequantize()
        parameter.data = values
        w._parameters[name] = parameter
    assert w.dequantize().shape == shape


# --- memory -----------------------------------------------------------------------------------------------


@pytest.fixture
def only_new_objects():
    """gc looks at nothing that was there before: a suite has made a million objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def tensor_bytes() -> int:
    """Bytes of all live tensors that gc looks at."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


@EVERY_FORMAT
@pytest.mark.usefixtures("tiling")
def test_one_layout_is_in_memory(cpu, format, only_new_objects):
    """After a weight was made, moved, saved and loaded, only tiles remain: its packed bytes and 2%."""
    options = quantize_options(format)
    published = sum(
        t.nbytes
        for t in formats.encode(torch.randn(2, 256, 256, dtype=BF16), format, **options)
        if t is not None
    )
    before = tensor_bytes()
    w = quantize(torch.randn(2, 256, 256, dtype=BF16), format, **options)
    w.to(BF16).load_state_dict(w.state_dict())
    w.dequantize()
    assert w.is_tiled and tensor_bytes() - before == w.nbytes
    assert published <= w.nbytes <= 1.02 * published
    w.to("meta").to_empty(device=cpu)
    assert w.is_tiled and tensor_bytes() - before == w.nbytes
    w.set_trainable().load_state_dict(w.state_dict())
    assert tensor_bytes() - before == w.nbytes > 1.9 * published
    w.set_trainable(False)
    assert tensor_bytes() - before == w.nbytes <= 1.02 * published


# --- operators --------------------------------------------------------------------------------------------


def meta_tiles(format: str, E: int, rows: int, cols: int) -> tuple:
    """data, scale and zero of a tiled weight on meta, and the code of its format."""
    w = random_weight(format, E, rows, cols, "cpu").to("meta")
    return *tiles_of(w), w.code


@pytest.mark.quick
@EVERY_FORMAT
def test_shapes_of_results(cpu, format):
    """What fake kernels say, and what is counted, of tiles: as of the published layout."""
    E, D, F, T, K = 3, 320, 192, 7, 2
    data, scale, zero, code = meta_tiles(format, E, F, D)
    offsets = torch.empty(E, dtype=torch.int32, device="meta")
    for width, transposed, expected in ((D, False, F), (F, True, D)):
        a = torch.empty(14, width, device="meta")
        with FlopCounterMode(display=False) as counter:
            out = torch.ops.fused_moe.quantized_mm(a, data, scale, zero, offsets, code, transposed)
        assert out.shape == (14, expected)
        assert counter.get_total_flops() == 2 * 14 * D * F
    w1, w3, w2 = (meta_tiles(format, E, *sides) for sides in ((F, D), (F, D), (D, F)))
    x, scores = torch.empty(T, D, device="meta"), torch.empty(T, K, device="meta")
    ids = torch.empty(T, K, dtype=torch.int32, device="meta")
    settings = (0, 0, [1.702, 7.0])
    with FlopCounterMode(display=False) as counter:
        formats = [w[3] for w in (w1, w3, w2)]
        weights = ([t for t in w[:3] if t is not None] for w in (w1, w3, w2))
        out, counts, _ = torch.ops.fused_moe.experts(x, *weights, scores, ids, *settings, formats=formats)
    assert out.shape == (T, D) and counts.shape == (E,)
    assert counter.get_total_flops() == 6 * T * K * D * F


@pytest.mark.quick
@pytest.mark.usefixtures("tiling")
@EVERY_FORMAT
def test_functions_on_meta(cpu, format):
    """fused_experts and the gradient of x, with tiles."""
    w1, w3, w2 = (random_weight(format, 3, *sides, cpu) for sides in ((64, 128), (64, 128), (128, 64)))
    assert w1.is_tiled and fused_moe.ops.quantized_sizes(w1.tensors[0]) == (3, 64, 128)
    with pytest.MonkeyPatch.context() as gpu:
        gpu.setattr(tiles, "are_read_on", lambda device: True)  # on meta, too
        w1, w2, w3 = (w.to("meta") for w in (w1, w2, w3))
    assert w1.is_tiled
    x = torch.empty(5, 128, device="meta", requires_grad=True)
    scores, ids = torch.empty(5, 2, device="meta"), torch.empty(5, 2, dtype=torch.int32, device="meta")
    out = fused_moe.fused_experts(x, w1, w2, w3, scores, ids)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape
    with torch.no_grad():
        assert fused_moe.fused_experts(x, w1, w2, w3, scores, ids).shape == x.shape


@pytest.mark.quick
@pytest.mark.usefixtures("tiling")
@EVERY_FORMAT
def test_backward_gets_the_second_packing(cpu, format):
    """It is the second packing of the GEMM's weight, on meta."""
    weights = [random_weight(format, 3, *sides, cpu, 1) for sides in ((64, 128), (64, 128), (128, 64))]
    with pytest.MonkeyPatch.context() as gpu:
        gpu.setattr(tiles, "are_read_on", lambda device: True)  # on meta, too
        w1, w3, w2 = (w.set_trainable().to("meta") for w in weights)
    x = torch.empty(5, 128, device="meta", requires_grad=True)
    scores, ids = torch.empty(5, 2, device="meta"), torch.empty(5, 2, dtype=torch.int32, device="meta")
    with Calls() as calls:
        fused_moe.fused_experts(x, w1, w2, w3, scores, ids).sum().backward()
    named = fused_moe.ops.Schema("quantized_mm").named
    found = [named(*args) for args, _ in calls.of("quantized_mm")]
    assert [args.transposed for args in found] == [False] + [True] * 3  # forward of w1 and w3 is quantized_up
    for w in (w1, w3, w2):
        of_w = [args for args in found if args.data is w.tensors[0]]
        assert [args.transposed for args in of_w] == ([False, True] if w is w2 else [True])
        for args in of_w:
            packing = args.data_t, args.scale_t, args.zero_t
            assert all(a is b for a, b in zip(packing, w.transposed_tensors, strict=True))


@pytest.mark.usefixtures("tiling")
@EVERY_FORMAT
def test_the_cpus_operators_refuse_tiles(cpu, format):
    """They say what they expected and what they found."""
    w = random_weight(format, 2, 64, 128, cpu)
    offsets = torch.tensor([1, 2], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="expected data of 3 dimensions.* found"):
        torch.ops.fused_moe.quantized_mm(torch.randn(2, 128), *w.tensors, offsets, w.code)
    moe = quantize(FusedMoE(64, 64, 4, 2, dtype=BF16), format, **quantize_options(format))
    with torch.no_grad(), pytest.raises(RuntimeError, match="expected data of 3 dimensions.* found"):
        moe(torch.randn(3, 64, dtype=BF16))


@pytest.mark.quick
def test_the_second_packing_is_for_tiles_alone(cpu):
    """The operator refuses it beside the published layout, which the CPU reads."""
    w = random_weight("int4", 2, 64, 128, cpu, scale_of=1)
    a, offsets = torch.randn(2, 64), torch.tensor([1, 2], dtype=torch.int32)
    packing = transposed_tiles_of(w)
    for some in (packing, (packing[0], None, None), (None, None, packing[2])):
        with pytest.raises(RuntimeError, match="expected data in tiles.* beside data_t, found 3 dimensions"):
            torch.ops.fused_moe.quantized_mm(a, *w.tensors, offsets, w.code, True, *some)


def test_the_second_packing_has_no_gradient(cpu):
    """As codes and scales have none."""
    w = random_weight("fp8", 2, 64, 128, "cpu")
    data, scale, _ = (t if t is None else t.to("meta") for t in tiles_of(w))
    data_t, scale_t, _ = (t if t is None else t.to("meta") for t in transposed_tiles_of(w))
    a = torch.empty(4, 128, device="meta", requires_grad=True)
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    out = torch.ops.fused_moe.quantized_mm(
        a, data, scale, None, offsets, w.code, False, data_t, scale_t.requires_grad_()
    )
    with pytest.raises(RuntimeError, match="quantised weights are frozen"):
        out.sum().backward()

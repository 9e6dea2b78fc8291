"""Loaders of published checkpoints against packing written out here, examples, and the formats' own packages.

All values are exact: codes, zero points and scales are small enough for float32, or rounded once.
"""

import re
from types import SimpleNamespace

import pytest
import torch

from fused_moe.quantized import (
    QuantizedWeight,
    formats,
    from_awq,
    from_compressed_tensors,
    from_fp8_block,
    from_gptq,
    from_gptq_experts,
    from_mxfp4,
)

pytestmark = pytest.mark.usefixtures("cpu")

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F64)
NAME = "layers.3.mlp.experts.*.up_proj"
STACKED = pytest.mark.parametrize("stacked", (False, True), ids=("experts", "stacked"))


# --- checkpoints ------------------------------------------------------------------------------------------


def checkpoint(tensors, stacked=False, name=NAME):
    """The tensors (E, ...) under their names, and the name that finds them."""
    if stacked:
        name = name.replace(".*", "")
        return {name + suffix: tensor for suffix, tensor in tensors.items()}, name
    state = {}
    for suffix, tensor in tensors.items():
        state |= {name.replace("*", str(e)) + suffix: one.clone() for e, one in enumerate(tensor)}
    return state, name


def word(codes):
    """Eight codes of 4 bits, the first in the lowest bits, as an int32."""
    value = sum(code << 4 * i for i, code in enumerate(codes))
    return value - 2**32 if value >= 2**31 else value


def packed(codes, order=range(8)):
    """(E, n, m) to (E, n, ceil(m / 8)); place i of a word holds its code number order[i]."""
    padded = torch.nn.functional.pad(codes, (0, -codes.size(-1) % 8)).unflatten(-1, (-1, 8))
    words = [word(codes) for codes in padded[..., list(order)].flatten(0, -2).tolist()]
    return torch.tensor(words, dtype=torch.int32).view(padded.shape[:-1])


def packed_down(codes):
    """As packed, along the first dimension of each expert's matrix."""
    return packed(codes.mT).mT.contiguous()


def of_compressed_tensors(codes, zero, scale):
    E, rows, cols = codes.shape
    tensors = {
        ".weight_packed": packed(codes),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor([[rows, cols]] * E),
    }
    return tensors if zero is None else tensors | {".weight_zero_point": packed_down(zero)}


def of_gptq(codes, zero, scale, zero_offset=1):
    zero = torch.full(scale.shape, 8) if zero is None else zero
    return {
        ".qweight": packed_down(codes.mT),
        ".qzeros": packed(zero.mT - zero_offset),
        ".scales": scale.mT.contiguous(),
        ".g_idx": torch.arange(codes.size(2)).expand(codes.size(0), -1) * scale.size(2) // codes.size(2),
    }


def of_awq(codes, zero, scale):
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    zero = torch.full(scale.shape, 8) if zero is None else zero
    return {
        ".qweight": packed(codes.mT, order),
        ".qzeros": packed(zero.mT, order),
        ".scales": scale.mT.contiguous(),
    }


INT4 = {
    "compressed_tensors": (of_compressed_tensors, from_compressed_tensors),
    "gptq": (of_gptq, from_gptq),
    "gptq_v2": (lambda *w: of_gptq(*w, 0), lambda *args, **more: from_gptq(*args, zero_offset=0, **more)),
    "awq": (of_awq, from_awq),
}


def random_int4(E=3, rows=24, cols=256, group=64, symmetric=False, scale_dtype=F16):
    """codes, zero, scale and the values they stand for. Zero points are at least 1, so that GPTQ's do not
    borrow."""
    codes = torch.randint(0, 16, (E, rows, cols))
    zero = None if symmetric else torch.randint(1, 16, (E, rows, cols // group))
    scale = (torch.rand(E, rows, cols // group) + 0.5).to(scale_dtype)
    return codes, zero, scale, values_of(codes, zero, scale)


def values_of(codes, zero, scale):
    """(codes - zero) * scale in float64, rounded to float32."""
    group = codes.size(2) // scale.size(2)
    offset = 8 if zero is None else zero.repeat_interleave(group, 2)
    return ((codes - offset).double() * scale.double().repeat_interleave(group, 2)).float()


# --- codes of 4 bits --------------------------------------------------------------------------------------


@pytest.mark.quick(one_in=5)
@STACKED
@pytest.mark.parametrize("symmetric", (False, True))
@pytest.mark.parametrize("group", (32, 64, 128))
@pytest.mark.parametrize("layout", INT4)
def test_int4(layout, group, symmetric, stacked):
    """Every value, and no zero points where none are needed."""
    publish, load = INT4[layout]
    codes, zero, scale, expected = random_int4(group=group, symmetric=symmetric)
    w = load(*checkpoint(publish(codes, zero, scale), stacked), dtype=F32)
    assert (w.format, w.shape, w.dtype) == ("int4", (3, 24, 256), F32)
    assert torch.equal(w.dequantize(), expected)
    assert (w.zero is None) == symmetric and w.scale.dtype == F16


@pytest.mark.parametrize("scale_dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
@pytest.mark.parametrize("layout", INT4)
def test_int4_scale_dtypes(layout, scale_dtype):
    """Scales keep their dtype."""
    publish, load = INT4[layout]
    *tensors, expected = random_int4(scale_dtype=scale_dtype)
    w = load(*checkpoint(publish(*tensors)))
    assert w.dtype == BF16 and w.scale.dtype == scale_dtype
    assert torch.equal(w.dequantize(F32), expected)


# Codes, zero points and scales of test_int4_examples, as the packages' own functions packed them.
EXAMPLES = {
    # PackedQuantizationCompressor.compress of compressed-tensors 0.20.0
    "compressed_tensors": {
        ".weight_packed": [
            [1318386256, -668105751, 1640373362, -95378165],
            [1908878723, 189838876, -1795600475, 763615294],
            [-1527099210, 1048832335, -953388328, 1354107745],
            [-684882967, 1639324786, -94395125, -2081866092],
            [173061660, -1796649051, 763549758, -1239653945],
            [1032055119, -954436904, 1354042209, -380660486],
            [1622547570, -95443701, -2081931628, 477284141],
            [-1813426267, 762501182, -1239719481, 1336277584],
        ],
        ".weight_zero_point": [[1049950800]],
    },
    # TorchLinear.pack_original of gptqmodel 7.7.0, and convert_gptq_v2_to_v1_format_module for "gptq"
    "gptq_v2": {
        ".qweight": [
            [1318386256, 1908878723, -1527099210, -684882967, 173061660, 1032055119, 1622547570, -1813426267],
            [-668105751, 189838876, 1048832335, 1639324786, -1796649051, -954436904, -95443701, 762501182],
            [1640373362, -1795600475, -953388328, -94395125, 763549758, 1354042209, -2081931628, -1239719481],
            [-95378165, 763615294, 1354107745, -2081866092, -1239653945, -380660486, 477284141, 1336277584],
        ],
        ".qzeros": [[1049950800]],
    },
    # WQLinear_GEMM.from_linear of AutoAWQ 0.2.9, of four such matrices below each other, the first's words
    "awq": {
        ".qweight": [
            [w]
            for w in (
                *(1603480672, -1528270411, -113392118, 1317149535, -1814601564, -399723015, 1030818382),
                *(-1814601564, -399723015, 1030818382, -2100928621, -686054168, 744552765, 1907707522),
                *(-686054168, 744552765, 1907707522, -972385321, 459270188, 1621376369, -1241939258),
                *(459270188, 1621376369, -1241939258, 172939035, 1603480672, -1528270411, -113392118),
                *(1603480672, -1528270411, -113392118, 1317149535),
            )
        ],
        ".qzeros": [[972416160]],
    },
}
EXAMPLES["gptq"] = EXAMPLES["gptq_v2"] | {".qzeros": [[763619647]]}


@pytest.mark.quick
@pytest.mark.parametrize("layout", EXAMPLES)
def test_int4_examples(layout):
    """What the packages wrote, with zero points from 0 to 15: in gptq, those of 0 borrow from a neighbour."""
    row, column = torch.arange(8)[:, None], torch.arange(32)
    codes, zero = (3 * row + 5 * column + column // 7) % 16, 5 * row % 16
    scale = torch.exp2(-(row % 3).float())
    tensors = {name: torch.tensor([words], dtype=torch.int32) for name, words in EXAMPLES[layout].items()}
    scale_name, stored = (
        (".scales", scale.T) if "gptq" in layout or layout == "awq" else (".weight_scale", scale)
    )
    w = INT4[layout][1](*checkpoint(tensors | {scale_name: stored[None]}), dtype=F32)
    assert torch.equal(w.dequantize()[0], (codes - zero) * scale)


def test_compressed_tensors_older_zero_points():
    """Signed int8, one per element; and rows that are no multiple of eight."""
    codes, zero, scale, expected = random_int4(rows=21)
    tensors = of_compressed_tensors(codes, zero, scale)
    assert tensors[".weight_zero_point"].shape == (3, 3, 4)
    assert torch.equal(from_compressed_tensors(*checkpoint(tensors)).dequantize(F32), expected)
    tensors[".weight_zero_point"] = (zero - 8).to(torch.int8)
    assert torch.equal(from_compressed_tensors(*checkpoint(tensors)).dequantize(F32), expected)


@pytest.mark.parametrize("g_idx", (torch.arange(256) // 64, torch.full((256,), -1)), ids=("order", "unset"))
def test_compressed_tensors_trivial_g_idx(g_idx):
    *tensors, expected = random_int4()
    tensors = of_compressed_tensors(*tensors) | {".weight_g_idx": g_idx.int().expand(3, -1)}
    assert torch.equal(from_compressed_tensors(*checkpoint(tensors)).dequantize(F32), expected)


# --- act-order --------------------------------------------------------------------------------------------


def act_order_experts(symmetric=False, D=128, F=256):
    """A checkpoint of experts whose down has act-order, and the three weights' values (E, out, in)."""
    state, values = {}, []
    for name, rows, cols in (("gate", F, D), ("up", F, D), ("down", D, F)):
        codes, zero, scale, value = random_int4(rows=rows, cols=cols, symmetric=symmetric)
        tensors = of_gptq(codes, zero, scale)
        if name == "down":  # column k of the checkpoint is column order[k] of a weight in order
            order = torch.stack([torch.randperm(cols) for _ in codes])
            tensors[".qweight"] = packed_down(codes.mT.gather(1, order[..., None].expand(-1, -1, rows)))
            tensors[".g_idx"] = order // 64
            value = value.gather(2, order[:, None].expand(-1, rows, -1))
        values.append(value)
        state |= checkpoint(tensors, name=f"experts.*.{name}")[0]
    return state, values


NAMES = ("experts.*.gate", "experts.*.up", "experts.*.down")


def expert(x, gate, up, down):
    return (torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT


@pytest.mark.quick
@pytest.mark.parametrize("symmetric", (False, True))
def test_act_order(symmetric):
    """The experts compute the same function, and hold the same values in the order of the groups."""
    state, (gate, up, down) = act_order_experts(symmetric)
    w1, w2, w3 = from_gptq_experts(state, *NAMES, dtype=F32)
    for e in range(3):
        order = torch.argsort(state[f"experts.{e}.down.g_idx"], stable=True)
        assert torch.equal(w1.dequantize()[e], gate[e, order])
        assert torch.equal(w2.dequantize()[e], down[e][:, order])
        assert torch.equal(w3.dequantize()[e], up[e, order])
    x = torch.randn(5, 128, dtype=F64)
    found = expert(x, *(w.dequantize(F64) for w in (w1, w3, w2)))
    torch.testing.assert_close(found, expert(x, *(w.double() for w in (gate, up, down))), rtol=0, atol=1e-8)


def test_act_order_of_none():
    """Columns in order stay where they are."""
    *tensors, expected = random_int4(rows=256)
    state = {}
    for name in NAMES:
        state |= checkpoint(of_gptq(*tensors), name=name)[0]
    for w in from_gptq_experts(state, *NAMES):
        assert torch.equal(w.dequantize(F32), expected)


def test_act_order_refused():
    state, _ = act_order_experts()
    with pytest.raises(ValueError, match=r"experts\.0\.down\.g_idx = k // 64.*act-order; from_gptq_experts"):
        from_gptq(state, NAMES[2])
    with pytest.raises(
        ValueError, match=r"experts\.\*\.gate \(E, out, in\) = \(3, 128, 128\).*\(3, 256, 128\)"
    ):
        from_gptq_experts(state, *NAMES[:2], NAMES[0])
    uneven = state | {"experts.1.down.g_idx": torch.arange(256) % 3}
    with pytest.raises(ValueError, match="64 columns in each group, found other numbers"):
        from_gptq_experts(uneven, *NAMES)
    zeros = {f"experts.{e}.up.bias": torch.zeros(256) for e in range(3)}
    from_gptq_experts(state | zeros, *NAMES)
    with pytest.raises(ValueError, match=r"no bias experts\.\*\.up\.bias beside act-order"):
        from_gptq_experts(state | zeros | {"experts.2.up.bias": torch.ones(256)}, *NAMES)
    state["experts.1.up.g_idx"] = torch.arange(128).flip(0) // 64
    with pytest.raises(ValueError, match=r"experts\.1\.up\.g_idx = k // 64.*only down may have act-order"):
        from_gptq_experts(state, *NAMES)
    *tensors, _ = random_int4()
    tensors = of_compressed_tensors(*tensors) | {
        ".weight_g_idx": torch.arange(256).flip(0).expand(3, -1) // 64
    }
    with pytest.raises(ValueError, match=r"up_proj\.weight_g_idx = k // 64 .*act-order; quantise it anew"):
        from_compressed_tensors(*checkpoint(tensors))


# --- codes of 8 bits --------------------------------------------------------------------------------------


def random_codes(dtype, E=3, rows=200, cols=300):
    codes = torch.randint(-128, 128, (E, rows, cols), dtype=torch.int8)
    return codes if dtype == torch.int8 else torch.where(codes & 127 == 127, 0, codes).view(E4M3)


def block_values(codes, scale):
    rows, cols = (torch.arange(n) // 128 for n in codes.shape[1:])
    return codes.float() * scale.float()[:, rows][:, :, cols]


@pytest.mark.quick
@STACKED
@pytest.mark.parametrize("scale_dtype", (F32, BF16, E8M0), ids=("f32", "bf16", "e8m0"))
def test_fp8_block(scale_dtype, stacked):
    """Sides that are no multiple of 128, in the names of DeepSeek-V3 and those of transformers 5."""
    codes, scale = random_codes(E4M3), (torch.rand(3, 2, 3) + 0.5).to(scale_dtype)
    stem = "" if stacked else ".weight"
    state, name = checkpoint({stem: codes, stem + "_scale_inv": scale}, stacked)
    w = from_fp8_block(state, name)
    assert (w.format, w.dtype, w.scale.dtype) == ("fp8_block", BF16, F32)
    assert torch.equal(w.dequantize(F32), block_values(codes, scale))
    assert not stacked or w.data.data_ptr() == codes.data_ptr()


@STACKED
@pytest.mark.parametrize("scale_dtype", (F32, BF16), ids=("f32", "bf16"))
@pytest.mark.parametrize(
    "dtype, shape",
    [(dtype, s) for dtype in (E4M3, torch.int8) for s in ((), (1,), (1, 1), (200, 1))] + [(E4M3, (2, 3))],
    ids=str,
)
def test_compressed_tensors_8_bits(dtype, shape, scale_dtype, stacked):
    """The scale's shape says whether it is a matrix', a row's or a block's."""
    codes, scale = random_codes(dtype), (torch.rand(3, *shape) + 0.5).to(scale_dtype)
    tensors = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.ones(3)}
    w = from_compressed_tensors(*checkpoint(tensors, stacked))
    if shape == (2, 3):
        assert w.format == "fp8_block"
        assert torch.equal(w.dequantize(F32), block_values(codes, scale))
    else:
        assert w.format == ("fp8" if dtype == E4M3 else "int8") and w.scale.dtype == scale_dtype
        assert torch.equal(w.dequantize(F32), codes.float() * scale.float().view(3, -1, 1))


# --- mxfp4 ------------------------------------------------------------------------------------------------


def mxfp4_values(codes, exponents):
    """E2M1 values of codes (E, out, in) times 2^(exponent - 127)."""
    return E2M1[codes] * torch.exp2(exponents.double() - 127).repeat_interleave(32, 2)


@pytest.mark.quick
def test_mxfp4():
    """gpt-oss: the even column in the lower half of a byte."""
    codes = torch.randint(0, 16, (3, 24, 96))
    exponents = torch.randint(100, 150, (3, 24, 3), dtype=torch.uint8)
    data = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    name = "layers.3.mlp.experts.gate_up_proj"
    state = {f"{name}_blocks": data.view(3, 24, 3, 16), f"{name}_scales": exponents, f"{name}_bias": None}
    w = from_mxfp4(state, name)
    assert (w.format, w.shape, w.dtype) == ("mxfp4", (3, 24, 96), BF16)
    assert torch.equal(w.dequantize(F32).double(), mxfp4_values(codes, exponents))
    assert w.data.data_ptr() == data.data_ptr()


def test_compressed_tensors_mxfp4():
    """mxfp4-pack-quantized, as compressed-tensors 0.20.0 packed codes (5 k + k // 7) % 16 of scale 1/4."""
    data = [80, 250, 148, 78, 233, 3, 45, 208, 114, 28, 198, 97, 11, 165, 80, 250]
    tensors = {".weight_packed": torch.tensor([[data]]), ".weight_scale": torch.tensor([[[125]]])}
    w = from_compressed_tensors(*checkpoint({k: v.to(torch.uint8) for k, v in tensors.items()}))
    column = torch.arange(32)
    expected = mxfp4_values((5 * column + column // 7)[None, None] % 16, torch.tensor([[[125]]]))
    assert w.format == "mxfp4" and torch.equal(w.dequantize(F64), expected)


# --- any checkpoint ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, load",
    (
        ("int4", from_compressed_tensors),
        ("fp8", from_compressed_tensors),
        ("int8", from_compressed_tensors),
        ("fp8_block", from_fp8_block),
    ),
)
def test_own_state_dict(format, load):
    """What a QuantizedWeight saves."""
    tensors = formats.encode(torch.randn(3, 40, 256), format, group_size=64, symmetric=False)
    w = QuantizedWeight(*tensors, format=format, shape=(3, 40, 256))
    found = load(w.state_dict(prefix="w1."), "w1")
    assert found.format == format
    for ours, theirs in zip(found.tensors, w.tensors, strict=True):
        assert ours is theirs is None or torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("layout", INT4)
def test_meta(layout):
    publish, load = INT4[layout]
    state, name = checkpoint(publish(*random_int4()[:3]))
    w = load({key: tensor.to("meta") for key, tensor in state.items()}, name)
    assert w.shape == (3, 24, 256) and all(t.is_meta for t in w.tensors)


def test_twelve_experts():
    """Numbers of two digits, in their order, beside tensors of others."""
    *tensors, expected = random_int4(E=12, cols=32, group=32)
    state, name = checkpoint(of_awq(*tensors))
    others = {
        "layers.3.mlp.experts.12.down_proj.qweight": None,
        "layers.13.mlp.experts.12.up_proj.qweight": None,
    }
    found = from_awq(dict(reversed(state.items())) | others, name)
    assert torch.equal(found.dequantize(F32), expected)


def ct(**changes):
    return changed(of_compressed_tensors(*random_int4()[:3]), changes)


def gptq(**changes):
    return changed(of_gptq(*random_int4()[:3]), changes)


def awq(**changes):
    return changed(of_awq(*random_int4()[:3]), changes)


def fp8(**changes):
    return changed({".weight": random_codes(E4M3), ".weight_scale_inv": torch.ones(3, 2, 3)}, changes)


def changed(tensors, changes):
    """A tensor given as a function is made of the one it replaces; None takes it away."""
    for key, change in changes.items():
        old = tensors.pop("." + key, None)
        if change is not None:
            tensors["." + key] = change(old) if callable(change) else change
    return tensors


ERRORS = {
    "no scale": (
        from_awq,
        lambda: awq(scales=None),
        ValueError,
        r"tensors .*up_proj\.scales, found no layers\.3",
    ),
    "scale dtype": (
        from_awq,
        lambda: awq(scales=torch.Tensor.int),
        TypeError,
        "0.*scales of dtype float32 or",
    ),
    "group": (
        from_awq,
        lambda: awq(scales=lambda t: t[:, :1]),
        ValueError,
        "32 or 64 or 128.*1 of them for 256",
    ),
    "rows": (
        from_awq,
        lambda: awq(scales=lambda t: t[..., 1:]),
        ValueError,
        r"\(in / g, 24\), found \(4, 23\)",
    ),
    "zeros": (
        from_awq,
        lambda: awq(qzeros=lambda t: t[:, 1:]),
        ValueError,
        r"qzeros.*\(4, 3\), found \(3, 3\)",
    ),
    "words": (from_gptq, lambda: gptq(qweight=torch.Tensor.long), TypeError, "qweight of dtype int32, found"),
    "g_idx": (from_gptq, lambda: gptq(g_idx=torch.ones(3, 8).int()), ValueError, r"\(256\), found \(8,\)"),
    "8 bits": (
        from_compressed_tensors,
        lambda: ct(weight_shape=torch.tensor([[24, 128]] * 3)),
        ValueError,
        r"weight_shape = \(24, 256\), of codes of 4 bits",
    ),
    "zero rows": (
        from_compressed_tensors,
        lambda: ct(weight_zero_point=lambda t: t.to(torch.int8)),
        ValueError,
        "torch.int8 of 24 rows, found 3",
    ),
    "zero range": (
        from_compressed_tensors,
        lambda: ct(weight_zero_point=torch.full((3, 24, 4), 8, dtype=torch.int8)),
        ValueError,
        "weight_zero_point from -8 to 7",
    ),
    "nvfp4": (
        from_compressed_tensors,
        lambda: ct(weight_packed=lambda t: t.view(torch.uint8), weight_scale=lambda t: t.to(E4M3)),
        TypeError,
        "weight_scale of dtype uint8",
    ),
    "float": (
        from_compressed_tensors,
        lambda: {".weight": torch.ones(3, 8, 8)},
        TypeError,
        "float8_e4m3fn or int8, found torch.float32",
    ),
    "scale shape": (
        from_compressed_tensors,
        lambda: fp8(weight_scale=torch.ones(3, 200, 2)),
        ValueError,
        r"\(1, 1\) or \(200, 1\) or \(2, 3\), found \(200, 2\)",
    ),
    "zero of 8 bits": (
        from_compressed_tensors,
        lambda: fp8(weight_scale=torch.ones(3, 1), weight_zero_point=torch.ones(3, 1)),
        ValueError,
        "weight_zero_point of zeros",
    ),
    "blocks": (
        from_fp8_block,
        lambda: fp8(weight_scale_inv=torch.ones(3, 4, 5)),
        ValueError,
        r"experts\.0.*weight_scale_inv of shape \(2, 3\), found \(4, 5\)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    load, publish, error, message = ERRORS[case]
    with pytest.raises(error, match=f"{load.__name__}: .*{message}"):
        load(*checkpoint(publish()))


PUBLISHED = {
    "gptq": (from_gptq, gptq),
    "awq": (from_awq, awq),
    "compressed-tensors": (from_compressed_tensors, ct),
    "mxfp4-pack-quantized": (
        from_compressed_tensors,
        lambda: {
            ".weight_packed": torch.randint(256, (3, 24, 64)).byte(),
            ".weight_scale": torch.ones(3, 24, 4).byte(),
        },
    ),
    "int-quantized": (
        from_compressed_tensors,
        lambda: {".weight": random_codes(torch.int8), ".weight_scale": torch.ones(3, 200, 1)},
    ),
    "float-quantized": (
        from_compressed_tensors,
        lambda: {".weight": random_codes(E4M3), ".weight_scale": torch.ones(3, 1)},
    ),
    "fp8_block": (from_fp8_block, fp8),
}


def misshapen(tensor: torch.Tensor):
    """Tensors in the place of one expert's: sparse, empty, of other sizes and numbers of dimensions."""
    raw = tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor
    yield raw.to_sparse()
    yield tensor[None]
    yield tensor.new_empty(0)
    for dim in range(tensor.dim()):
        for size in (0, 1, 3, tensor.size(dim) - 1, tensor.size(dim) + 1, 2 * tensor.size(dim)):
            shape = [size if d == dim else n for d, n in enumerate(tensor.shape)]
            yield torch.zeros(shape).to(tensor.dtype)


@pytest.mark.quick
@pytest.mark.parametrize("kind", PUBLISHED)
def test_what_no_loader_takes(kind):
    """Every tensor of an expert and of all, misshapen: TypeError or ValueError, or a weight that it fits."""
    load, publish = PUBLISHED[kind]
    num_errors = 0
    for stacked in (False, True):
        state, name = checkpoint(publish(), stacked)
        assert load(state, name).dequantize().dim() == 3
        for key in state:
            for wrong in misshapen(state[key]):
                try:
                    load({**state, key: wrong}, name).dequantize()
                except (TypeError, ValueError) as error:
                    num_errors += 1
                    assert re.match(rf"({load.__name__}|QuantizedWeight): expected .*, found ", str(error))
    assert num_errors > 20


def small_gptq(cols: int, rows: int) -> dict:
    return {
        "w.qweight": torch.zeros(1, cols // 8, rows).int(),
        "w.qzeros": torch.zeros(1, cols // 32, -(-rows // 8)).int(),
        "w.scales": torch.ones(1, cols // 32, rows),
    }


def small_awq(cols: int, rows: int) -> dict:
    return {
        "w.qweight": torch.zeros(1, cols, rows // 8).int(),
        "w.qzeros": torch.zeros(1, cols // 32, rows // 8).int(),
        "w.scales": torch.ones(1, cols // 32, rows),
    }


WIDTHS = {
    "awq, odd": (
        from_awq,
        small_awq(65, 16),
        r"w.qweight with size\(1\), in, a multiple of 32, found \(1, 65, 2\)",
    ),
    "awq, none": (from_awq, small_awq(0, 16), r"w.qweight of sizes >= 1, found \(1, 0, 2\)"),
    "gptq, no group": (from_gptq, small_gptq(8, 16), r"w.scales of sizes >= 1, found \(1, 0, 16\)"),
    "gptq, none": (from_gptq, small_gptq(0, 16), r"w.qweight of sizes >= 1, found \(1, 0, 16\)"),
    "mxfp4, none": (
        from_mxfp4,
        {"w_blocks": torch.zeros(1, 4, 0, 16).byte(), "w_scales": torch.zeros(1, 4, 0).byte()},
        r"w_blocks of sizes >= 1, found \(1, 4, 0, 16\)",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", WIDTHS)
def test_widths_that_no_loader_takes(case):
    load, state, message = WIDTHS[case]
    with pytest.raises(ValueError, match=f"{load.__name__}: expected {message}"):
        load(state, "w")


@pytest.mark.quick
@pytest.mark.parametrize(
    "shape, message",
    (
        (torch.empty(3, 0).long(), r"of sizes >= 1, found \(3, 0\)"),
        (torch.tensor(256), r"of two elements for each expert, found shape \(\)"),
        (torch.ones(3, 1).long(), r"of two elements for each expert, found shape \(3, 1\)"),
    ),
)
def test_weight_shapes_that_are_none(shape, message):
    state, name = checkpoint(ct(weight_shape=shape), stacked=True)
    with pytest.raises(ValueError, match=f"from_compressed_tensors: expected {name}.weight_shape {message}"):
        from_compressed_tensors(state, name)


@pytest.mark.quick
@pytest.mark.parametrize("value", (1.0, True, "1", None, torch.tensor(1)), ids=repr)
def test_zero_offset_is_an_integer(value):
    state, name = checkpoint(gptq())
    experts = {key.replace("up_proj", part): t for key, t in state.items() for part in ("gate", "up", "down")}
    with pytest.raises(TypeError, match="from_gptq: expected zero_offset to be an int, found "):
        from_gptq(state, name, zero_offset=value)
    names = [name.replace("up_proj", part) for part in ("gate", "up", "down")]
    with pytest.raises(TypeError, match="from_gptq_experts: expected zero_offset to be an int, found "):
        from_gptq_experts(experts, *names, zero_offset=value)


def test_errors_of_experts():
    """Experts that are missing or do not agree, and names."""
    state, name = checkpoint(awq())
    with pytest.raises(ValueError, match="experts 0 to 3 .*, found no layers.3.mlp.experts.2.up_proj$"):
        from_awq({key.replace("experts.2", "experts.3"): t for key, t in state.items()}, name)
    with pytest.raises(ValueError, match=r"experts\.1\.up_proj\.qzeros$"):
        from_awq({key: t for key, t in state.items() if "1.up_proj.qzeros" not in key}, name)
    key = "layers.3.mlp.experts.1.up_proj.scales"
    with pytest.raises(ValueError, match=rf"{key} of shape \(4, 24\), found \(2, 24\)"):
        from_awq(state | {key: state[key][:2]}, name)
    with pytest.raises(TypeError, match=f"{key} of dtype float16, found torch.float32"):
        from_awq(state | {key: state[key].float()}, name)
    with pytest.raises(ValueError, match="on layers.3.*'s device cpu, found meta"):
        from_awq(state | {key: state[key].to("meta")}, name)
    with pytest.raises(TypeError, match="qweight to be a tensor, found list"):
        from_awq(state | {name.replace("*", "0") + ".qweight": []}, name)
    with pytest.raises(ValueError, match=r"qweight of 3 dimensions, found shape \(256, 3\)"):
        from_awq(state, name.replace("*", "0"))
    with pytest.raises(ValueError, match=r"tensors layers.*\.down_proj\.<...>.*, found none"):
        from_awq(state, name.replace("up", "down"))
    with pytest.raises(ValueError, match="a name with one"):
        from_awq(state, "*." + name)
    with pytest.raises(TypeError, match="name to be a str, found int"):
        from_awq(state, 3)
    with pytest.raises(TypeError, match="state_dict to be a mapping"):
        from_awq(list(state), name)
    with pytest.raises(ValueError, match="zero_offset 0 or 1, found 2"):
        from_gptq(*checkpoint(gptq()), zero_offset=2)
    with pytest.raises(ValueError, match="a name without .*, since gpt-oss stacks"):
        from_mxfp4({}, name)
    with pytest.raises(ValueError, match="up_proj_blocks, found no"):
        from_mxfp4({}, "up_proj")
    with pytest.raises(TypeError, match="floating dtype"):
        from_awq(state, name, dtype=torch.int8)


# --- packages ---------------------------------------------------------------------------------------------

COMPRESSED = {
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}),
    "int4-zero": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False},
    ),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
    "int8-channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
}
SCALE_SHAPES = {"group": (256, 4), "tensor": (1,), "channel": (256, 1), "block": (2, 2)}


@pytest.mark.parametrize("case", COMPRESSED)
def test_package_compressed_tensors(case):
    """Against its compress and decompress."""
    pytest.importorskip("compressed_tensors", "0.20", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    format, args = COMPRESSED[case]
    args = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(format)
    state, expected = {}, []
    for e in range(3):
        shape = SCALE_SHAPES[args.strategy]
        tensors = {
            "weight": torch.randn(256, 256).bfloat16(),
            "weight_scale": (torch.rand(shape) + 0.1).bfloat16(),
        }
        if not args.symmetric:
            tensors["weight_zero_point"] = torch.randint(-8, 8, shape, dtype=torch.int8)
        tensors = compressor.compress(tensors, scheme)
        expected.append(compressor.decompress(tensors, scheme)["weight"])
        state |= {f"experts.{e}.up.{name}": tensor for name, tensor in tensors.items()}
    assert torch.equal(from_compressed_tensors(state, "experts.*.up").dequantize(), torch.stack(expected))


@pytest.mark.parametrize("zero_offset", (0, 1))
@pytest.mark.parametrize("symmetric", (True, False))
def test_package_gptqmodel(symmetric, zero_offset):
    """Against its pack_original, conversion to version 1, and dequantize_weight."""
    reason = "gptqmodel is not installed"
    gptqmodel = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason=reason)
    convert = pytest.importorskip("gptqmodel.utils.model").convert_gptq_v2_to_v1_format_module
    state, expected = {}, []
    for e in range(3):
        linear = torch.nn.Linear(256, 64, bias=False)
        zero = torch.full((64, 4), 8.0) if symmetric else torch.randint(0, 16, (64, 4)).float()
        layer = gptqmodel.TorchLinear(
            bits=4, group_size=64, sym=symmetric, desc_act=False, in_features=256, out_features=64
        )
        layer.pack_original(
            linear, torch.rand(64, 4).half().float() / 50 + 0.01, zero, torch.arange(256) // 64
        )
        qzeros = layer.qzeros.clone()
        if zero_offset:
            convert(layer, SimpleNamespace(bits=4, pack_dtype=torch.int32))
        tensors = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
        state |= {f"experts.{e}.up.{name}": tensor for name, tensor in tensors.items()}
        layer.qzeros.copy_(qzeros)  # post_init and the values expect version 2
        layer.post_init()
        expected.append(layer.dequantize_weight().T)
    w = from_gptq(state, "experts.*.up", zero_offset=zero_offset, dtype=F16)
    assert torch.equal(w.dequantize(), torch.stack(expected))


def test_package_autoawq():
    """Against its from_linear and dequantize_gemm."""
    gemm = pytest.importorskip("awq.modules.linear.gemm", reason="autoawq is not installed")
    state, expected = {}, []
    for e in range(3):
        linear = torch.nn.Linear(256, 64, bias=False)
        scale, zero = torch.rand(4, 64).half().float() / 50 + 0.01, torch.randint(0, 16, (4, 64))
        layer = gemm.WQLinear_GEMM.from_linear(linear, 4, 64, scales=scale, zeros=zero)
        tensors = (layer.qweight, layer.qzeros, layer.scales)
        state |= dict(
            zip((f"experts.{e}.up.{name}" for name in ("qweight", "qzeros", "scales")), tensors, strict=True)
        )
        expected.append(gemm.dequantize_gemm(*tensors, 4, 64).T)
    assert torch.equal(from_awq(state, "experts.*.up", dtype=F16).dequantize(), torch.stack(expected))


def test_package_transformers_mxfp4():
    """Against the function with which transformers unpacks gpt-oss, whose result is transposed."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    blocks = torch.randint(0, 256, (3, 24, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 24, 4), dtype=torch.uint8)
    w = from_mxfp4({"down_proj_blocks": blocks, "down_proj_scales": scales}, "down_proj")
    assert torch.equal(w.dequantize(), mxfp4.convert_moe_packed_tensors(blocks, scales).mT)


@pytest.mark.parametrize("scale_fmt", (None, "ue8m0"))
@STACKED
def test_package_transformers_fp8(stacked, scale_fmt):
    """Against transformers' quantising and dequantising of blocks."""
    reason = "transformers is not installed"
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8", reason=reason)
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt=scale_fmt)
    quantizer = SimpleNamespace(quantization_config=config)
    try:
        quantise, dequantise = fp8.Fp8Quantize(quantizer), fp8.Fp8Dequantize(quantizer)
    except (AttributeError, TypeError):
        pytest.skip("this version of transformers has other classes for blocks of fp8")
    w = torch.randn(3, 256, 384)
    names = ["experts.up"] if stacked else [f"experts.{e}.up.weight" for e in range(3)]
    state = {}
    for name, weight in zip(names, [w] if stacked else w, strict=True):
        state |= quantise.convert({name: weight})
    found = from_fp8_block(state, "experts.up" if stacked else "experts.*.up", dtype=F32)
    expected = [dequantise._dequantize_one(state[name], state[f"{name}_scale_inv"], F32) for name in names]
    assert torch.equal(found.dequantize(), torch.stack(expected).view_as(w))

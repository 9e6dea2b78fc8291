"""8 bits on both operands on Hopper: tiles of 16 rows, of 64, and full ones; rows that no tile covers."""

import pytest
import torch
from cases import BF16, F16, Case
from test_eight_bit_operator import EVERY_FORMAT, STORED, call, check, make

pytestmark = pytest.mark.gpu
EXPERTS, TOP_K = 5, 2
# tokens: up to 2 rows of an expert on average, up to 64, and more
TILES = {"tiles of 16 rows": 4, "tiles of 64 rows": 90, "full tiles": 700}
EVERY_TILE = pytest.mark.parametrize("tokens", TILES.values(), ids=TILES)


@pytest.fixture(autouse=True)
def hopper(sm90):
    """The tier that has these kernels."""


def case(tokens: int, routing: str, layout: str = "separate", dtype=BF16, bias=True) -> Case:
    return Case(tokens, 208, 192, EXPERTS, TOP_K, dtype, routing, layout, bias=bias)


@EVERY_FORMAT
@EVERY_TILE
@pytest.mark.parametrize("layout", STORED)
def test_every_layout(device, format, tokens, layout):
    """Also with slots that no expert here has, so that rows past the last one are zeroed."""
    for routing in ("random", "sentinels"):
        check(make(format, case(tokens, routing, layout, F16), device))


@pytest.mark.sanitizer
@EVERY_FORMAT
@EVERY_TILE
def test_rows_past_the_last_one(device, format, tokens):
    """Nothing is written beside them; ids, which the test reads afterwards, are as they were."""
    for routing in ("sentinels", "none"):
        check(make(format, case(tokens, routing), device))


@EVERY_FORMAT
def test_one_expert_has_all(device, format):
    for tokens in TILES.values():
        check(make(format, Case(tokens, 128, 64, 1, 1, BF16, "random", "separate"), device))


@EVERY_FORMAT
@pytest.mark.parametrize("layout", ("separate", "ungated"))
def test_same_bits_in_every_tile(device, format, layout):
    """A token's sums are promoted in the same order, whichever operand the MMAs take it for."""
    args = make(format, case(TILES["full tiles"], "random", layout), device)
    full = call(args)
    for tokens in (1, *TILES.values()):
        part = {n: t[:tokens] if n in ("x", "ids", "scores") else t for n, t in args.items()}
        assert torch.equal(call(part), full[:tokens])


@pytest.mark.parametrize("dtype", (BF16, F16))
@pytest.mark.parametrize("dim", (16, 2064, 7168))
def test_codes_of_tokens_and_of_rows(device, dim, dtype):
    """x becomes codes once for a token, or once for each row where scores multiply it first: ones here."""
    for power_of_two in (False, True):
        few = Case(TILES["tiles of 16 rows"], dim, 128, EXPERTS, TOP_K, dtype, "random", "separate")
        args = make("fp8_block", few, device, power_of_two=power_of_two)
        args["x"][0] *= 1e-4
        args["x"][1, -1] = 300
        args["x"][2] = 0
        args["x"][3, dim // 2] = float("nan")
        args["scores"] = torch.ones_like(args["scores"])
        found = call(args)
        assert torch.equal(found.isnan().any(1).cpu(), torch.arange(few.tokens) == 3)
        expected = call(args | {"score_on_input": True})
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())

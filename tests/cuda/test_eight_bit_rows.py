"""Rows that become codes on a GPU: which warps and CTAs have them, and whose factors, by all bits."""

import pytest
import torch
from cases import BF16, F16, poisoned
from gpu_cases import HALF_DTYPES
from test_eight_bit_operator import call, picked, picking

pytestmark = pytest.mark.gpu
HIDDEN = 272
# Columns of a row: of one warp, full or not, and of several with an unequal last one. A CTA has up to eight
# rows at once, from 4,112 on one, and from 8,208 on memory for one row ahead instead of two.
WIDTHS = (16, 208, 1024, 1040, 2816, 4112, 5136, 8208, 16384)
# Rows of each expert, in all an odd number. Experts change within a CTA's rows; a CTA of a GPU with 132 SMs
# has up to 30 of 3,999.
COUNTS = {
    "few rows": (1, 0, 0, 2, 0, 1, 1),
    "changes": (33, 1, 70, 2, 5, 129, 1, 64, 8),
    "empty experts": (0, 0, 3, 0, 0, 0, 65, 0, 1, 0, 0, 24, 0),
    "one has all": (0, 0, 501, 0),
    "many rows": (401, 1302, 0, 97, 1, 2198),
    "many experts": tuple(i * 7919 % 11 for i in range(187)),
    "no rows": (0, 0, 0),
}
MODES = {  # smooth1 and smooth2, scores on the input
    "smooth": (True, False),
    "smooth and scores": (True, True),
    "scores": (False, True),
    "plain": (False, False),
}
EVERY_MODE = pytest.mark.parametrize("mode", MODES)


def check(counts, width: int, mode: str, dtype, device, top_k: int = 3, spare: int = 0) -> None:
    """Tokens with top_k slots each, of which -1 are those past the counts and `spare` more."""
    smooths, on_input = MODES[mode]
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    none = -(len(ids) + spare) % top_k + spare
    ids = torch.cat([ids, ids.new_full((none,), -1)])
    ids = ids[torch.randperm(len(ids))].view(-1, top_k).to(device)
    T, E = len(ids), len(counts)
    x = torch.randn(T, width).to(device, dtype)
    scores = (torch.rand(T, top_k) if on_input else torch.ones(T, top_k)).to(device)
    args = picking(x, scores, ids, E, HIDDEN, score_on_input=on_input)
    if smooths:
        args |= {f"smooth{i}": torch.rand(E, n).add(0.5).to(device) for i, n in ((1, width), (2, HIDDEN))}
    with poisoned():
        found = call(args)
    assert torch.equal(found.cpu(), picked(args))


@EVERY_MODE
@pytest.mark.parametrize("counts", COUNTS)
def test_experts(device, counts, mode):
    for width in (208, 2816):
        check(COUNTS[counts], width, mode, BF16, device)


@EVERY_MODE
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(device, width, mode):
    """Several rows of each group of warps, and rows past the last one, which no expert has."""
    check((401, 302, 0, 97, 1, 198), width, mode, F16, device, spare=90)


@EVERY_MODE
def test_many_slots(device, mode):
    """More than a warp has lanes."""
    check((70, 1, 93, 40), 208, mode, BF16, device, top_k=40)


@HALF_DTYPES
@EVERY_MODE
def test_portable_tier(device, tier, dtype, mode):
    tier("portable")
    check(COUNTS["changes"], 1040, mode, dtype, device, spare=7)


def test_smooth_at_any_address(device):
    """Views whose storage begins a word before them."""
    T, E, D = 65, 5, 208
    x, ids = torch.randn(T, D).to(device, BF16), torch.randint(E, (T, 1), device=device)
    args = picking(x, torch.ones(T, 1, device=device), ids, E, HIDDEN)
    for i, n in ((1, D), (2, HIDDEN)):
        args[f"smooth{i}"] = torch.rand(E * n + 1).add(0.5).to(device)[1:].view(E, n)
    assert torch.equal(call(args).cpu(), picked(args))


@pytest.mark.sanitizer
def test_under_the_sanitizer(device):
    for mode in MODES:
        check(COUNTS["empty experts"], 1040, mode, BF16, device, spare=5)
        check((3, 0, 2, 4), 8208, mode, BF16, device)

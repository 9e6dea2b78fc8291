"""Draws the figures of docs/hopper_gemm.md and docs/decode_path.md.

    python tools/figures.py [FOLDER]          FOLDER: docs/

Each is an SVG on a light ground of its own, so it reads the same on a light and on a dark page.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
INK, GREY, BLUE, GREEN, AMBER, RED, LILAC = (
    "#1f2328",
    "#eef0f3",
    "#dbe9fe",
    "#d9f2e0",
    "#fff0c7",
    "#fbdcd9",
    "#e9e0fb",
)


class Figure:
    """Shapes in pixels; text is centred unless `anchor` says otherwise."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'font-family="Helvetica,Arial,sans-serif" font-size="16" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>',
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="#fff" '
            'stroke="#d0d7de"/>',
        ]

    def text(self, x, y, words, anchor="middle", size=16, bold=False):
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight}>'
            f"{escape(words)}</text>"
        )

    def box(self, x, y, width, height, fill, *lines, size=15, dash=False, top=False):
        """The first line is bold. top: lines begin at the upper edge."""
        dashes = ' stroke-dasharray="4 3"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" '
            f'stroke="#57606a"{dashes}/>'
        )
        step = size + 3
        first = y + step if top else y + height / 2 - step * (len(lines) - 1) / 2 + size * 0.36
        for i, line in enumerate(lines):
            self.text(x + width / 2, first + step * i, line, size=size, bold=i == 0)

    def arrow(self, *points, dash=False):
        path = "M" + " ".join(f"{x:g} {y:g}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if dash else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.3" marker-end="url(#tip)"{dashes}/>'
        )

    def __str__(self):
        return "\n".join([*self.parts, "</svg>", ""])


def cta() -> Figure:
    """Roles, shared memory and barriers of a CTA."""
    f = Figure(960, 430, "One CTA of the GEMM: producer warpgroup, shared memory, two consumer warpgroups")
    f.text(100, 28, "global memory", bold=True)
    f.text(280, 28, "producer warpgroup", bold=True)
    f.text(530, 28, "shared memory", bold=True)
    f.text(815, 28, "consumer warpgroups", bold=True)
    f.box(30, 50, 140, 50, GREY, "schedule", "which tile is next")
    f.box(30, 140, 140, 60, GREY, "rows of A", "contiguous, or", "of chosen tokens")
    f.box(30, 225, 140, 50, GREY, "weight B", "(E, N, k)")
    f.box(30, 345, 140, 50, GREY, "output", "rows by expert")
    f.box(205, 50, 150, 50, BLUE, "warp 3", "fetches work tiles")
    f.box(205, 140, 150, 60, BLUE, "warps 0-2", "gather A by cp.async", "(or warp 0 by TMA)")
    f.box(205, 225, 150, 50, BLUE, "warp 0", "loads B by TMA")
    f.box(430, 50, 200, 50, AMBER, "tile queue x2", "expert, rows, columns")
    for i in range(4):
        f.box(430 + 52 * i, 140, 44, 135, AMBER, "stage", str(i), "A 16", "KiB", "B 32", "KiB", size=13)
    f.box(430, 345, 200, 50, AMBER, "staging 2 x 16 KiB", "64-column subtiles")
    lines = "wgmma m64n256k16", "128 accumulators a thread", "then the epilogue"
    f.box(725, 120, 190, 80, GREEN, "consumer 1: rows 0-63", *lines)
    f.box(725, 225, 190, 80, GREEN, "consumer 2: rows 64-127", *lines)
    f.arrow((170, 75), (205, 75))
    f.arrow((170, 170), (205, 170))
    f.arrow((170, 250), (205, 250))
    f.arrow((355, 75), (430, 75))
    f.arrow((355, 170), (430, 170))
    f.arrow((355, 250), (430, 250))
    f.arrow((630, 75), (820, 75), (820, 120))
    f.arrow((638, 170), (725, 160))
    f.arrow((638, 245), (725, 265))
    f.arrow((820, 305), (820, 370), (630, 370))
    f.arrow((430, 370), (170, 370))
    f.text(300, 362, "TMA store, clipped", size=15)
    f.text(725, 362, "stmatrix", size=15)
    f.text(530, 298, "full: 1 arrival + TMA's bytes (+ 96 with a gather)", size=15)
    f.text(530, 315, "empty: 8 arrivals, one per consumer warp", size=15)
    f.text(530, 118, "queue: 32 arrivals / one per reading warp", size=15)
    return f


def timeline() -> Figure:
    """Three epilogues over time."""
    f = Figure(960, 480, "Three epilogues: under the next main loop, at once, in a warpgroup of its own")

    def lane(y, name, *spans):
        f.text(150, y + 18, name, anchor="end", size=15)
        for begin, end, fill, label in spans:
            f.box(160 + begin, y, end - begin, 26, fill, label, size=13)

    f.text(20, 30, "grouped_mm: the rounded tile is held in registers", anchor="start", bold=True)
    for i, name in enumerate(("consumer 1", "consumer 2")):
        lane(
            45 + 32 * i,
            name,
            (0, 300, GREEN, "main loop of tile n"),
            (300, 330, AMBER, "hold"),
            (330, 630, GREEN, "main loop of tile n + 1"),
            (630, 660, AMBER, "hold"),
            (660, 780, GREEN, "tile n + 2"),
        )
    for i in range(4):
        f.box(490 + 40 * i, 109, 36, 26, LILAC, str(i), size=13)
    f.text(150, 127, "TMA stores", anchor="end", size=15)
    f.text(665, 127, "subtiles of tile n, one per k-tile", anchor="start", size=15)
    f.text(20, 175, "up_gate: h and a leave no registers to hold", anchor="start", bold=True)
    for i, shift in enumerate((0, 40)):
        lane(
            190 + 32 * i,
            f"consumer {i + 1}",
            (shift, 300 + shift, GREEN, "main loop of tile n"),
            (300 + shift, 400 + shift, AMBER, "act, store"),
            (400 + shift, 700 + shift, GREEN, "main loop of tile n + 1"),
        )
    f.text(20, 305, "down_dgrad: a fourth warpgroup computes the epilogue", anchor="start", bold=True)
    for i in range(2):
        lane(
            320 + 32 * i,
            f"consumer {i + 1}",
            (0, 300, GREEN, "main loop of tile n"),
            (300, 355, AMBER, "smem"),
            (355, 655, GREEN, "main loop of tile n + 1"),
            (655, 710, AMBER, "smem"),
        )
    lane(
        384,
        "epilogue warpgroup",
        (0, 260, LILAC, "tile n - 1: dh, a_scaled, dscores"),
        (355, 615, LILAC, "tile n"),
    )
    f.arrow((160, 445), (940, 445))
    f.text(930, 465, "time", anchor="end", size=15)
    return f


def tiles() -> Figure:
    """The grouped order of an expert's tiles, and who computes them."""
    f = Figure(960, 400, "Order of tiles, static round-robin and work stealing")
    ctas, group, rows, columns = 4, 3, 5, 3
    colours = (BLUE, GREEN, AMBER, LILAC)
    order, first = [], 0
    while first < rows:
        height = min(group, rows - first)
        order += [(first + m, n) for n in range(columns) for m in range(height)]
        first += group
    f.text(140, 30, "Tiles of one expert, in order", bold=True)
    f.text(160, 52, "N tiles", size=15)
    f.text(40, 200, "row", size=15)
    f.text(40, 216, "tiles", size=15)
    for index, (m, n) in enumerate(order):
        f.box(70 + 62 * n, 62 + 54 * m + (10 if m >= group else 0), 58, 50, colours[index % ctas], str(index))
    f.text(163, 368, "groups of 3 here, 16 in the kernels", size=15)
    f.text(163, 385, "colour: the CTA it is assigned to", size=15)

    f.text(630, 30, "Four CTAs over time; CTA 2 starts late", bold=True)
    left = {cta: list(range(cta, len(order), ctas)) for cta in range(ctas)}
    free = [0.0, 0.0, 2.2, 0.0]
    spans = []
    while any(left.values()):
        cta = min(range(ctas), key=lambda c: (free[c], c))
        if left[cta]:
            owner = cta
        else:
            owner = max(range(ctas), key=lambda c: (len(left[c]), -c))
        spans.append((cta, free[cta], left[owner].pop(0), owner))
        free[cta] += 1
    x0, scale = 390, 108
    for cta in range(ctas):
        f.text(x0 - 10, 88 + 62 * cta, f"CTA {cta}", anchor="end", size=15)
    f.box(x0, 62 + 124, scale * 2.2 - 4, 42, "#fff", "another kernel holds the SM", dash=True)
    for cta, begin, index, owner in spans:
        words = (str(index), "stolen") if owner != cta else (str(index),)
        f.box(x0 + scale * begin, 62 + 62 * cta, scale - 4, 42, colours[owner], *words)
    f.arrow((x0, 325), (935, 325))
    f.text(930, 345, "time", anchor="end", size=15)
    f.text(650, 368, "In lockstep, tiles 0, 1, 2 read the same columns of B", size=15)
    f.text(650, 385, "once from L2. An idle CTA steals from the one with most left.", size=15)
    return f


def decode() -> Figure:
    """The launches of a layer without gradients, by number of slots."""
    f = Figure(960, 330, "Launches of a layer without gradients")
    names = {
        "logits": (110, BLUE, ("router_logits",)),
        "route": (90, BLUE, ("route",)),
        "plan": (90, AMBER, ("plan",)),
        "choice": (125, AMBER, ("choice + plan", "one cluster")),
        "count": (70, AMBER, ("count",)),
        "scatter": (75, AMBER, ("scatter",)),
        "up": (125, GREEN, ("up_gate",)),
        "down": (125, GREEN, ("down",)),
        "both": (255, GREEN, ("up_gate's tiles, then down's",)),
        "all": (430, GREEN, ("plan in each CTA, up_gate, down, combine",)),
        "sum": (90, LILAC, ("combine",)),
    }
    rows = (
        ("up to 64", "logits route all"),
        ("up to 4,096, few rows", "logits choice both sum"),
        ("up to 4,096", "logits choice up down sum"),
        ("up to 8,192", "logits route plan up down sum"),
        ("more", "logits route count scatter up down sum"),
    )
    f.text(105, 32, "slots (tokens x K)", bold=True)
    f.text(560, 32, "launches", bold=True)
    for i, (what, sequence) in enumerate(rows):
        y, x = 50 + 52 * i, 210
        f.text(190, y + 25, what, anchor="end", size=15)
        for name in sequence.split():
            width, fill, lines = names[name]
            f.box(x, y, width, 40, fill, *lines, size=13)
            x += width + 4
    f.text(560, 318, "few rows: at most 32 per expert on average, with quantised weights at most 2", size=15)
    return f


def decode_launch() -> Figure:
    """Tiles of both GEMMs in one launch."""
    f = Figure(960, 300, "Both GEMMs of few rows in one launch")
    f.text(480, 28, "Tiles of both GEMMs are claimed in order from one counter", bold=True)
    x0, scale = 145, 1.5

    def span(cta, begin, end, fill, *lines, **options):
        f.box(x0 + scale * begin, 50 + 56 * cta, scale * (end - begin) - 4, 40, fill, *lines, **options)

    for cta in range(3):
        f.text(130, 76 + 56 * cta, f"CTA {cta}", anchor="end", size=15)
        span(cta, 0, 50, AMBER, "sort")
    span(0, 50, 270, GREEN, "up 0 (expert a)")
    span(1, 50, 190, GREEN, "up 1 (expert a)")
    span(2, 50, 220, GREEN, "up 2 (expert b)")
    span(1, 190, 270, LILAC, "down 0 (a)", "w2 loads, waits", size=13, dash=True)
    span(2, 220, 270, LILAC, "down 1 (a)", "w2 loads", size=13, dash=True)
    span(0, 270, 390, LILAC, "down 2 (b)")
    span(1, 270, 350, LILAC, "down 0")
    span(2, 270, 360, LILAC, "down 1")
    span(0, 390, 480, BLUE, "combine", "by the last to store", size=13)
    stored = x0 + scale * 270 - 2
    f.arrow((stored, 90), (stored, 106), dash=True)
    f.arrow((stored, 146), (stored, 162), dash=True)
    f.text(700, 132, "stored_a[a] counts the stored rows", anchor="start", size=15)
    f.arrow((145, 225), (935, 225))
    f.text(930, 245, "time", anchor="end", size=15)
    f.text(
        480,
        262,
        "A down tile loads its weights at once, and a when the count says that all of it is stored.",
        size=15,
    )
    f.text(
        480,
        281,
        "It waits only for tiles that running CTAs hold, so the launch ends on any number of free SMs.",
        size=15,
    )
    return f


FIGURES = {
    "hopper_gemm_cta": cta,
    "hopper_gemm_timeline": timeline,
    "hopper_gemm_tiles": tiles,
    "decode_path": decode,
    "decode_launch": decode_launch,
}


def main(folder: Path) -> None:
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(str(draw()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)

/* fused_moe._host: the tile plan of plan.h and the build's facts, for tests, info() and pictures.
 *
 * Nothing in training calls it. Kernels trust their plan; Python callers are checked here. */
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"

namespace py = pybind11;
using Ints = std::vector<int32_t>;

static void check(bool ok, const std::string &message) {
    if (!ok) throw py::value_error(message);
}

static void check_ends(const Ints &ends, int32_t tile_rows) {
    check(tile_rows >= 1, "tile_rows: expected at least 1, found " + std::to_string(tile_rows));
    check(std::is_sorted(ends.begin(), ends.end()) && (ends.empty() || ends.front() >= 0),
          "ends: expected row numbers that never decrease, from 0 up");
}

static Ints plan_tiles(const Ints &ends, int32_t tile_rows) {
    check_ends(ends, tile_rows);
    Ints tiles(fused_moe_tiles_length(ends.size()));
    fused_moe_plan_tiles(ends.data(), ends.size(), tile_rows, tiles.data());
    return tiles;
}

static py::tuple find_tile(const Ints &tiles, const Ints &ends, int32_t tile, int32_t tile_rows) {
    check(tiles == plan_tiles(ends, tile_rows), "tiles: not the plan of these ends and tile_rows");
    if (tile < 0 || tile >= tiles[1])
        throw py::index_error("tile: expected 0 <= tile < " + std::to_string(tiles[1]) +
                              ", found " + std::to_string(tile));
    FusedMoeTile found =
        fused_moe_find_tile(tiles.data(), ends.data(), ends.size(), tile_rows, tile);
    return py::make_tuple(found.expert, found.first_row, found.num_rows);
}

static py::dict build_info() {
    py::dict info;
    for (const auto &[name, value] : std::vector<std::pair<const char *, const char *>>{BUILD_INFO})
        info[name] = value;
    return info;
}

PYBIND11_MODULE(_host, m) {
    using namespace py::literals;
    m.doc() = "Host-side planners of fused_moe and the facts of its build.";
    m.attr("TILE_ROWS") = static_cast<int>(FUSED_MOE_TILE_ROWS);
    m.def("plan_tiles", plan_tiles, "ends"_a, "tile_rows"_a = +FUSED_MOE_TILE_ROWS,
          "The tile plan (csrc/plan.h) of experts whose rows end at `ends`.");
    m.def("find_tile", find_tile, "tiles"_a, "ends"_a, "tile"_a,
          "tile_rows"_a = +FUSED_MOE_TILE_ROWS,
          "(expert, first row, number of rows) of one tile of a plan.");
    m.def("build_info", build_info,
          "Compilers, GPU targets, and the PyTorch built against and aimed at.");
}

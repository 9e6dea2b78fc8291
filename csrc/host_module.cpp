/* fused_moe._host: the tile plan of plan.h, the schedule of schedule.h and the build's facts, for
 * tests, info() and pictures.
 *
 * Nothing in training calls it. Kernels trust their plan; Python callers are checked here. */
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"
#include "schedule.h"

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

/* In the order of FusedMoeOrder. */
static const std::vector<std::string> ORDERS = {"linear", "grouped", "column"};

static FusedMoeSchedule schedule(int32_t tile_rows, int32_t few_rows, const std::string &order,
                                 int32_t group, bool interleave) {
    auto place = std::find(ORDERS.begin(), ORDERS.end(), order);
    check(0 <= few_rows && few_rows <= tile_rows,
          "few_rows: expected 0 to tile_rows = " + std::to_string(tile_rows) + ", found " +
              std::to_string(few_rows));
    check(place != ORDERS.end(), "order: expected linear, grouped or column, found " + order);
    check(group >= 1, "group: expected at least 1, found " + std::to_string(group));
    return {tile_rows, few_rows, static_cast<int32_t>(place - ORDERS.begin()), group, interleave};
}

static Ints plan(const Ints &ends, const FusedMoeSchedule &s) {
    Ints work(fused_moe_work_length(ends.size()));
    fused_moe_plan_work(ends.data(), ends.size(), &s, work.data());
    return work;
}

static Ints plan_work(const Ints &ends, int32_t tile_rows, int32_t few_rows,
                      const std::string &order, int32_t group, bool interleave) {
    check_ends(ends, tile_rows);
    return plan(ends, schedule(tile_rows, few_rows, order, group, interleave));
}

static py::tuple find_work(const Ints &work, const Ints &ends, int32_t num_columns, int64_t index,
                           int32_t tile_rows, int32_t few_rows, const std::string &order,
                           int32_t group, bool interleave) {
    check_ends(ends, tile_rows);
    FusedMoeSchedule s = schedule(tile_rows, few_rows, order, group, interleave);
    check(work == plan(ends, s), "work: not the plan of these ends, tile_rows and few_rows");
    check(num_columns >= 1,
          "num_columns: expected at least 1, found " + std::to_string(num_columns));
    int64_t num_items = int64_t(work[2]) * num_columns;
    check(num_items < INT64_C(1) << 31, "num_columns: expected fewer than 2^31 items, found " +
                                            std::to_string(work[2]) + " row tiles times " +
                                            std::to_string(num_columns) + " columns");
    /* A group of all row tiles is as good as a larger one, which could pass 32 bits. */
    s.group = std::min(s.group, std::max(work[2], 1));
    if (index < 0 || index >= num_items)
        throw py::index_error("index: expected 0 <= index < " + std::to_string(num_items) +
                              ", found " + std::to_string(index));
    FusedMoeWork found = fused_moe_find_work(work.data(), ends.data(), ends.size(), &s, num_columns,
                                             static_cast<uint32_t>(index));
    return py::make_tuple(found.rows.expert, found.rows.first_row, found.rows.num_rows,
                          found.column, found.few != 0);
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
    m.def("plan_work", plan_work, "ends"_a, py::kw_only(), "tile_rows"_a, "few_rows"_a, "order"_a,
          "group"_a, "interleave"_a,
          "The schedule (csrc/schedule.h) of experts whose rows end at `ends`. order: linear, "
          "grouped or column.");
    m.def("find_work", find_work, "work"_a, "ends"_a, "num_columns"_a, "index"_a, py::kw_only(),
          "tile_rows"_a, "few_rows"_a, "order"_a, "group"_a, "interleave"_a,
          "(expert, first row, number of rows, tile of columns, few rows?) of the item drawn as "
          "number `index`.");
    m.def("build_info", build_info,
          "Compilers, GPU targets, and the PyTorch built against and aimed at.");
}

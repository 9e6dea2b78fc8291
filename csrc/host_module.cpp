/* fused_moe._host: the tile plan of plan.h, the schedule of schedule.h and the build's facts, for
 * tests, info() and pictures.
 *
 * Nothing in training calls it. Kernels trust their plan; Python callers are checked here. */
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <optional>
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

static FusedMoeSchedule schedule(int32_t tile_rows, int32_t skinny_rows, int32_t group,
                                 bool interleave, int32_t split_last_wave, bool keep_empty) {
    check(0 <= skinny_rows && skinny_rows <= tile_rows,
          "skinny_rows: expected 0 to tile_rows = " + std::to_string(tile_rows) + ", found " +
              std::to_string(skinny_rows));
    check(group >= 1, "group: expected at least 1, found " + std::to_string(group));
    check(split_last_wave >= 0,
          "split_last_wave: expected at least 0, found " + std::to_string(split_last_wave));
    return {tile_rows, skinny_rows, group, interleave, split_last_wave, keep_empty};
}

static Ints plan(const Ints &ends, const FusedMoeSchedule &s) {
    Ints work(fused_moe_work_length(ends.size()));
    fused_moe_plan_work(ends.data(), ends.size(), &s, work.data());
    return work;
}

static Ints plan_work(const Ints &ends, int32_t tile_rows, int32_t skinny_rows, int32_t group,
                      bool interleave, int32_t split_last_wave, bool keep_empty) {
    check_ends(ends, tile_rows);
    return plan(ends,
                schedule(tile_rows, skinny_rows, group, interleave, split_last_wave, keep_empty));
}

static uint32_t num_items(const Ints &work, int32_t num_columns, uint32_t split_last_wave) {
    check(num_columns >= 1,
          "num_columns: expected at least 1, found " + std::to_string(num_columns));
    int64_t num_tiles = int64_t(work.at(2)) * num_columns;
    check(num_tiles < INT64_C(1) << 31, "num_columns: expected fewer than 2^31 tiles, found " +
                                            std::to_string(work[2]) + " row tiles times " +
                                            std::to_string(num_columns) + " columns");
    return static_cast<uint32_t>(num_tiles) +
           fused_moe_num_split_tiles(split_last_wave, static_cast<uint32_t>(num_tiles));
}

static py::tuple find_work_tile(const Ints &work, const Ints &ends, int32_t num_columns,
                                int64_t index, int32_t tile_rows, int32_t skinny_rows,
                                int32_t group, bool interleave, int32_t split_last_wave,
                                bool keep_empty) {
    check_ends(ends, tile_rows);
    FusedMoeSchedule s =
        schedule(tile_rows, skinny_rows, group, interleave, split_last_wave, keep_empty);
    check(work == plan(ends, s), "work: not the plan of these ends, tile_rows and skinny_rows");
    uint32_t items = num_items(work, num_columns, split_last_wave);
    if (index < 0 || index >= items)
        throw py::index_error("index: expected 0 <= index < " + std::to_string(items) + ", found " +
                              std::to_string(index));
    FusedMoeWorkTile found = fused_moe_find_work_tile(work.data(), ends.data(), ends.size(), &s,
                                                      num_columns, static_cast<uint32_t>(index));
    return py::make_tuple(found.rows.expert, found.rows.first_row, found.rows.num_rows,
                          found.column, found.half, found.skinny != 0);
}

/* Workers that draw, in whatever order they are asked. */
class TileSchedulers {
    uint32_t num_items;
    std::vector<uint32_t> claimed;
    std::map<uint32_t, FusedMoeTileScheduler> schedulers;

  public:
    TileSchedulers(uint32_t num_items, uint32_t num_ctas)
        : num_items(num_items), claimed(num_ctas) {
        check(1 <= num_ctas && num_ctas <= FUSED_MOE_MAX_CTAS,
              "num_ctas: expected 1 to " + std::to_string(FUSED_MOE_MAX_CTAS) + ", found " +
                  std::to_string(num_ctas));
    }

    std::optional<uint32_t> next(uint32_t cta) {
        uint32_t num_ctas = static_cast<uint32_t>(claimed.size());
        check(cta < num_ctas, "cta: expected less than " + std::to_string(num_ctas) + ", found " +
                                  std::to_string(cta));
        if (!schedulers.count(cta))
            schedulers[cta] = fused_moe_tile_scheduler(claimed.data(), num_items, cta, num_ctas);
        uint32_t item = fused_moe_next_tile(&schedulers[cta]);
        if (item >= num_items) return std::nullopt;
        return item;
    }
};

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
    m.attr("MAX_CTAS") = static_cast<int>(FUSED_MOE_MAX_CTAS);
    m.def("plan_tiles", plan_tiles, "ends"_a, "tile_rows"_a = +FUSED_MOE_TILE_ROWS,
          "The tile plan (csrc/plan.h) of experts whose rows end at `ends`.");
    m.def("find_tile", find_tile, "tiles"_a, "ends"_a, "tile"_a,
          "tile_rows"_a = +FUSED_MOE_TILE_ROWS,
          "(expert, first row, number of rows) of one tile of a plan.");
    m.def("plan_work", plan_work, "ends"_a, py::kw_only(), "tile_rows"_a, "skinny_rows"_a,
          "group"_a, "interleave"_a, "split_last_wave"_a, "keep_empty"_a = false,
          "The schedule (csrc/schedule.h) of experts whose rows end at `ends`.");
    m.def(
        "split_k_schedule",
        [](int64_t num_rows, int64_t num_tiles, int num_ctas) {
            check(num_rows >= 1 && num_tiles >= 1 && num_ctas >= 1,
                  "num_rows, num_tiles, num_ctas: expected at least 1");
            FusedMoeSchedule s = fused_moe_split_k_schedule(num_rows, num_tiles, num_ctas);
            py::dict how;
            how["tile_rows"] = s.tile_rows;
            how["skinny_rows"] = s.skinny_rows;
            how["group"] = s.group;
            how["interleave"] = s.interleave != 0;
            how["split_last_wave"] = s.split_last_wave;
            how["keep_empty"] = s.keep_empty != 0;
            return py::make_tuple(how, fused_moe_max_slices(num_rows, &s));
        },
        "num_rows"_a, "num_tiles"_a, "num_ctas"_a,
        "The schedule of weight gradients, as plan_work takes it, and the slices that there can "
        "be.");
    m.def("num_items", num_items, "work"_a, "num_columns"_a, "split_last_wave"_a,
          "Items of a schedule and so many tiles of columns.");
    m.def(
        "find_work_tile", find_work_tile, "work"_a, "ends"_a, "num_columns"_a, "index"_a,
        py::kw_only(), "tile_rows"_a, "skinny_rows"_a, "group"_a, "interleave"_a,
        "split_last_wave"_a, "keep_empty"_a = false,
        "(expert, first row, number of rows, tile of columns, half of it or 0, few rows?) of item "
        "`index`.");
    py::class_<TileSchedulers>(m, "TileSchedulers",
                               "How num_ctas come to the items 0 .. num_items - 1.")
        .def(py::init<uint32_t, uint32_t>(), "num_items"_a, "num_ctas"_a)
        .def("next", &TileSchedulers::next, "cta"_a, "The item that a cta draws, or None.");
    m.def("build_info", build_info,
          "Compilers, GPU targets, and the PyTorch built against and aimed at.");
}

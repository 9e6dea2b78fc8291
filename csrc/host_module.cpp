/* fused_moe._host: what tests need of schedule.h beyond the operators of torch/planners.cpp.
 *
 * A tile of any 32-bit index, without a list of all, and the rules that choose split-K slices. A schedule and
 * its offs come from the tests and are trusted, as they are by the kernels. */
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "fused_moe.h"
#include "schedule.h"

namespace py = pybind11;
using Ints = std::vector<int32_t>;

static uint32_t check_index(int64_t index, uint32_t num_tiles) {
    if (index < 0 || index >= num_tiles)
        throw py::index_error("index: expected 0 <= index < " + std::to_string(num_tiles) + ", found " +
                              std::to_string(index));
    return static_cast<uint32_t>(index);
}

static py::tuple work_tile(const Ints &schedule, const Ints &offs, int32_t num_n_tiles, int32_t group,
                           bool interleave, int32_t split_last_wave, int64_t index) {
    FusedMoeTileOrder order = {num_n_tiles, group, interleave, split_last_wave};
    uint32_t checked = check_index(index, fused_moe_num_work_tiles(schedule.data(), &order));
    FusedMoeWorkTile tile =
        fused_moe_work_tile(schedule.data(), offs.data(), static_cast<int32_t>(offs.size()), &order, checked);
    return py::make_tuple(tile.expert, tile.first_row, tile.num_rows, tile.n_tile, tile.n_half, tile.skinny);
}

PYBIND11_MODULE(_host, m) {
    using namespace py::literals;
    m.doc() = "The functions of csrc/schedule.h that tests need and the operators do not offer.";
    m.def("work_tile", work_tile, "schedule"_a, "offs"_a, "num_n_tiles"_a, "group"_a, "interleave"_a,
          "split_last_wave"_a, "index"_a,
          "(expert, first_row, num_rows, n_tile, n_half, skinny) of work tile `index`.");
    m.def("slice_rows", fused_moe_slice_rows, "R"_a, "E"_a, "num_sms"_a);
    m.def("slices_per_tile", fused_moe_slices_per_tile, "R"_a, "slice_rows"_a, "weight_tiles"_a, "ctas"_a);
    m.def("num_split_slots", fused_moe_num_split_slots, "R"_a, "slice_rows"_a);
    m.def("split_slot", fused_moe_split_slot, "first"_a, "later"_a, "stride"_a, "slice"_a);
}

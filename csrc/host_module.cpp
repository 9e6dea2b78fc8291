/* fused_moe._host: what tests need of schedule.h beyond the operators of torch/planners.cpp, of slot_plan.h,
 * of rules.h, of formats.h and of quantized_tile.h.
 *
 * Tiles of any 32-bit index, without a list of all; tall tiles; the tiles of any words, which the operators
 * refuse; split-K slices; the plan of few slots, which else only kernels make; every rule on shapes; the
 * list of formats; and the codes of a tile. */
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "fused_moe.h"
#include "quantized_tile.h"
#include "rules.h"
#include "slot_plan.h"

namespace py = pybind11;
using Ints = std::vector<int32_t>;

static py::tuple as_tuple(const FusedMoeWorkTile &tile) {
    return py::make_tuple(tile.expert, tile.first_row, tile.num_rows, tile.n_tile, tile.n_half, tile.skinny);
}

static std::vector<py::tuple> any_work_tiles(const Ints &schedule, const Ints &offs, int32_t R,
                                             int32_t num_n_tiles, int32_t group, bool interleave,
                                             int32_t split_last_wave, bool tall, int32_t tile_rows,
                                             const std::optional<std::vector<uint32_t>> &indices) {
    int32_t E = static_cast<int32_t>(offs.size());
    FusedMoeTileOrder order = {tile_rows, num_n_tiles, group, interleave, split_last_wave, 1};
    size_t count = indices ? indices->size() : fused_moe_num_work_tiles(schedule.data(), E, R, &order);
    std::vector<py::tuple> tiles(count);
    for (uint32_t i = 0; i < tiles.size(); i++) {
        uint32_t index = indices ? (*indices)[i] : i;
        FusedMoeWorkTile tile = fused_moe_work_tile(schedule.data(), offs.data(), E, R, &order, index);
        tiles[i] = as_tuple(tall ? fused_moe_tall_tile(tile, offs.data(), R, &order) : tile);
    }
    return tiles;
}

static std::vector<py::tuple> any_wgrad_tiles(const Ints &schedule, const Ints &offs, int32_t R,
                                              int32_t weight_tiles, int32_t slice_rows,
                                              int32_t slices_per_tile) {
    int32_t E = static_cast<int32_t>(offs.size());
    FusedMoeWgradOrder order = {weight_tiles, slice_rows, slices_per_tile};
    std::vector<py::tuple> tiles(fused_moe_num_wgrad_tiles(schedule.data(), E, R, &order));
    for (uint32_t i = 0; i < tiles.size(); i++) {
        FusedMoeWgradTile t = fused_moe_wgrad_tile(schedule.data(), offs.data(), E, R, &order, i);
        tiles[i] = py::make_tuple(t.expert, t.first_row, t.num_rows, t.weight_tile, t.slice, t.num_slices);
    }
    return tiles;
}

/* The slot of each row, and the work tiles. */
static py::tuple slot_plan(const std::vector<int64_t> &experts, int32_t E, int32_t num_n_tiles,
                           int32_t split_last_wave, bool splits_skinny) {
    int32_t num_slots = static_cast<int32_t>(experts.size());
    if (!fused_moe_has_few_slots(num_slots, E))
        throw py::value_error("experts: expected 1 to 64 slots, found " + std::to_string(experts.size()));
    FusedMoeSlotPlan plan = {};
    for (int32_t i = 0; i < FUSED_MOE_FEW_SLOTS; i++)
        plan.key[i] = fused_moe_slot_key(i < num_slots ? experts[i] : -1, i, E);
    fused_moe_plan_slots(&plan, num_slots);
    FusedMoeTileOrder order = fused_moe_default_order(num_n_tiles, split_last_wave);
    order.splits_skinny = splits_skinny;
    std::vector<py::tuple> tiles(fused_moe_num_slot_tiles(&plan, &order));
    for (uint32_t i = 0; i < tiles.size(); i++) tiles[i] = as_tuple(fused_moe_slot_tile(&plan, &order, i));
    Ints slots(plan.first_row[plan.num_experts]);
    for (size_t row = 0; row < slots.size(); row++) slots[row] = fused_moe_slot_of_row(&plan, row);
    return py::make_tuple(slots, tiles);
}

/* The codes of a tile's words, row by row. */
static std::vector<uint32_t> tile_codes(int format, const std::vector<uint32_t> &words) {
    FusedMoeCode code = fused_moe_format(static_cast<FusedMoeFormat>(format)).code;
    size_t expected = 256 * fused_moe_lane_words(code);
    if (words.size() != expected)
        throw py::value_error("words: expected " + std::to_string(expected) + ", found " +
                              std::to_string(words.size()));
    std::vector<uint32_t> codes;
    for (int32_t row = 0; row < 64; row++)
        for (int32_t column = 0; column < 64; column++) {
            int32_t s = column / 16, u = column / 8 % 2, t = column / 2 % 4, i = column % 2;
            const uint32_t *lane = words.data() + fused_moe_first_word(code, row, t);
            codes.push_back(fused_moe_code_of_lane(code, lane, s, u, i));
        }
    return codes;
}

/* rules.h: arguments are those of the functions, in their order. */
static void def_rules(py::module_ &m) {
    m.def("has_skinny_average", fused_moe_has_skinny_average);
    m.def("few_rows", fused_moe_few_rows);
    m.def("few_rows_together", fused_moe_few_rows_together);
    m.def("few_rows_subtiles", fused_moe_few_rows_subtiles);
    m.def("experts_up_subtiles", fused_moe_experts_up_subtiles);
    m.def("down_reads_before_wait", fused_moe_down_reads_before_wait);
    m.def("most_quantized_rows", fused_moe_most_quantized_rows);
    m.def("quantized_tile_rows", fused_moe_quantized_tile_rows);
    m.def("quantized_together", fused_moe_quantized_together);
    m.def("quantized_down_columns", fused_moe_quantized_down_columns);
    m.def("quantized_down_spreads", fused_moe_quantized_down_spreads);
    m.attr("eight_bit_width") = static_cast<int>(FUSED_MOE_EIGHT_BIT_WIDTH);
    m.attr("eight_bit_most_width") = static_cast<int>(FUSED_MOE_EIGHT_BIT_MOST_WIDTH);
    m.attr("eight_bit_auto_rows") = static_cast<int>(FUSED_MOE_EIGHT_BIT_AUTO_ROWS);
    m.def("auto_takes_codes", fused_moe_auto_takes_codes);
    m.def("fp8_wgrad_pays", fused_moe_fp8_wgrad_pays);
    m.def("fp8_column_chunk", fused_moe_fp8_column_chunk);
    m.def("gathers_first", fused_moe_gathers_first);
    m.def("takes_turns", fused_moe_takes_turns);
    m.def("wgrad_is_write_bound", fused_moe_wgrad_is_write_bound);
    m.def("wgrad_takes_turns", fused_moe_wgrad_takes_turns);
    m.def("wgrad_tiles_at_once", fused_moe_wgrad_tiles_at_once);
    m.def("router_slice", fused_moe_router_slice);
    m.def("router_cta_slices", fused_moe_router_cta_slices);
    m.def("router_tile", [](int64_t T, int64_t E, int32_t num_ctas) {
        return static_cast<int>(fused_moe_router_tile(T, E, num_ctas));
    });
    m.def("chooses_by_warp", fused_moe_chooses_by_warp);
    m.def("has_few_slots", fused_moe_has_few_slots);
    m.def("span_slots", fused_moe_span_slots);
    m.def("has_cluster_plan", fused_moe_has_cluster_plan);
    m.def("planner", [](int64_t T, int64_t K, int64_t E, bool gemms_plan, bool has_clusters, bool chooses) {
        return static_cast<int>(fused_moe_planner(T, K, E, gemms_plan, has_clusters, chooses));
    });
    m.def("counts_every_slot", fused_moe_counts_every_slot);
    m.def("num_spans", fused_moe_num_spans);
    m.def("has_few_tokens", fused_moe_has_few_tokens);
}

/* (name, kind of code, its bits, has zero points, scales, block) */
static std::vector<py::tuple> formats() {
    return {
#define X(name, code, zeros, scales, block)                                                                  \
    py::make_tuple(#name, #code, fused_moe_code_bits(FUSED_MOE_CODE_##code), zeros, #scales, #block),
        FUSED_MOE_FORMATS(X)
#undef X
    };
}

PYBIND11_MODULE(_host, m) {
    using namespace py::literals;
    m.doc() = "The functions of csrc/schedule.h, slot_plan.h, rules.h, formats.h and quantized_tile.h that "
              "tests need and the operators do not offer.";
    m.def("any_work_tiles", any_work_tiles, "schedule"_a, "offs"_a, "R"_a, "num_n_tiles"_a, "group"_a,
          "interleave"_a, "split_last_wave"_a, "tall"_a = false,
          "tile_rows"_a = static_cast<int>(FUSED_MOE_TILE_ROWS), "indices"_a = py::none(),
          "(expert, first_row, num_rows, n_tile, n_half, skinny) of all work tiles or of those at `indices`, "
          "whatever the words are; tall: as a GEMM that has tall tiles computes them.");
    m.def("any_wgrad_tiles", any_wgrad_tiles, "schedule"_a, "offs"_a, "R"_a, "weight_tiles"_a, "slice_rows"_a,
          "slices_per_tile"_a,
          "All (expert, first_row, num_rows, weight_tile, slice, num_slices), whatever the words are.");
    m.def("slot_plan", slot_plan, "experts"_a, "E"_a, "num_n_tiles"_a, "split_last_wave"_a, "splits_skinny"_a,
          "(slot of each row, work tiles) of 1 to 64 slots; experts outside [0, E) are none.");
    def_rules(m);
    m.def("formats", formats,
          "(name, kind of code, its bits, has zero points, scales, block) of every quantised format.");
    m.def("tile_codes", tile_codes, "format"_a, "words"_a,
          "The codes of a tile, row by row; format: its number in formats().");
    m.def("slice_rows", fused_moe_slice_rows, "R"_a, "E"_a, "num_sms"_a);
    m.def("slices_per_tile", fused_moe_slices_per_tile, "R"_a, "slice_rows"_a, "weight_tiles"_a, "ctas"_a,
          "k_tile"_a = 64);
    m.def("num_split_slots", fused_moe_num_split_slots, "R"_a, "slice_rows"_a);
    m.def("split_slot", fused_moe_split_slot, "first"_a, "later"_a, "stride"_a, "slice"_a);
}

/* The planners of schedule.h as operators on CPU tensors, for `python tools/schedule.py` and the tests.
 *
 * Each runs the C function of its name, which the kernels run too. Training calls none of them. Tiles are
 * listed as rows of an int32 matrix, one column per member of FusedMoeWorkTile or FusedMoeWgradTile. */
#include <cstring>
#include <tuple>
#include <vector>

#include "bindings.h"

namespace {

using Ints = std::vector<int32_t>;

/* --- checks --------------------------------------------------------------------------------------------- */

int32_t checked_size(const char *op, const char *name, int64_t found, int64_t low, int64_t high) {
    check_size(op, name, found, low, high);
    return static_cast<int32_t>(found);
}

void check_int32(const char *op, const char *name, const Tensor &x, int64_t dim) {
    if (!x.is_cpu()) fail(op, "expected ", name, " on the CPU, found another device");
    check_dtype(op, name, x, ScalarType::Int);
    check_dim(op, name, x, dim);
}

/* Cumulative ends (E,) of the experts' rows. */
Ints checked_offs(const char *op, const Tensor &offs) {
    check_int32(op, "offs", offs, 1);
    check_size(op, "experts", offs.numel(), 0, MAX_EXPERTS);
    Tensor copy = dense(offs);
    Ints ends(ints(copy), ints(copy) + copy.numel());
    for (size_t e = 0; e < ends.size(); e++)
        if (int32_t before = e ? ends[e - 1] : 0; ends[e] < before)
            fail(op, "expected offs that never decrease, from 0 up; found ", ends[e], " after ", before);
    return ends;
}

int32_t num_rows(const Ints &offs) {
    return offs.empty() ? 0 : offs.back();
}

Ints make_schedule(const Ints &offs, int32_t tile_rows, int32_t slice_rows) {
    int32_t E = static_cast<int32_t>(offs.size());
    Ints schedule(fused_moe_schedule_words(E));
    fused_moe_schedule_row_tiles(schedule.data(), offs.data(), E, tile_rows);
    fused_moe_schedule_slices(schedule.data(), offs.data(), E, slice_rows);
    return schedule;
}

/* A schedule of these offs. Words past the last active expert are zeros. */
Ints checked_schedule(const char *op, const Tensor &schedule, const Ints &offs) {
    check_int32(op, "schedule", schedule, 1);
    int64_t E = offs.size(), words = fused_moe_schedule_words(E);
    if (schedule.numel() != words)
        fail(op, "expected a schedule of ", words, " words for ", E, " experts, found ", schedule.numel());
    Tensor copy = dense(schedule);
    const FusedMoeScheduleHead *head = fused_moe_schedule_head(ints(copy));
    check_size(op, "tile_rows in schedule", head->tile_rows, 1, MAX_ROWS);
    check_size(op, "slice_rows in schedule", head->slice_rows, 1, MAX_ROWS);
    Ints expected = make_schedule(offs, head->tile_rows, head->slice_rows);
    auto same = [&](const void *found, const void *wanted, int64_t count) {
        return !count || !memcmp(found, wanted, count * sizeof(int32_t));
    };
    FusedMoeExpertList active = fused_moe_active_experts(expected.data(), E);
    FusedMoeExpertList sliced = fused_moe_sliced_experts(expected.data(), E);
    const int32_t *found = ints(copy), *base = expected.data();
    if (!(same(found, base, FUSED_MOE_HEAD_WORDS) &&
          same(found + (active.expert - base), active.expert, active.num) &&
          same(found + (active.end - base), active.end, active.num) &&
          same(found + (sliced.expert - base), sliced.expert, 2 * E)))
        fail(op, "expected the schedule of these offs, found another one");
    return expected;
}

void check_num_tiles(const char *op, int64_t num_tiles) {
    if (num_tiles > INT32_MAX) fail(op, "expected fewer than 2^31 tiles, found ", num_tiles);
}

/* A matrix of one tile per row. */
template <typename Tile, typename MakeTile>
Tensor list_tiles(const Tensor &like, uint32_t num_tiles, MakeTile make_tile) {
    constexpr int64_t WORDS = sizeof(Tile) / sizeof(int32_t);
    Tensor tiles = new_tensor(like, {num_tiles, WORDS});
    Tile *out = static_cast<Tile *>(tiles.mutable_data_ptr());
    for (uint32_t index = 0; index < num_tiles; index++) out[index] = make_tile(index);
    return tiles;
}

/* --- operators ------------------------------------------------------------------------------------------ */

Tensor tile_schedule(const Tensor &offs, int64_t tile_rows, int64_t slice_rows) {
    const char *op = "tile_schedule";
    check_size(op, "tile_rows", tile_rows, 1, MAX_ROWS);
    check_size(op, "slice_rows", slice_rows, 1, MAX_ROWS);
    Ints schedule = make_schedule(checked_offs(op, offs), static_cast<int32_t>(tile_rows),
                                  static_cast<int32_t>(slice_rows));
    Tensor out = new_tensor(offs, {static_cast<int64_t>(schedule.size())});
    memcpy(out.mutable_data_ptr(), schedule.data(), schedule.size() * sizeof(int32_t));
    return out;
}

Tensor work_tiles(const Tensor &schedule, const Tensor &offs, int64_t num_n_tiles, int64_t group,
                  bool interleave, int64_t split_last_wave) {
    const char *op = "work_tiles";
    Ints ends = checked_offs(op, offs), words = checked_schedule(op, schedule, ends);
    int32_t E = static_cast<int32_t>(ends.size()), R = num_rows(ends);
    const FusedMoeScheduleHead *head = fused_moe_schedule_head(words.data());
    FusedMoeTileOrder order = {head->tile_rows,
                               checked_size(op, "num_n_tiles", num_n_tiles, 1, INT32_MAX),
                               checked_size(op, "group", group, 1, INT32_MAX),
                               interleave,
                               checked_size(op, "split_last_wave", split_last_wave, 0, FUSED_MOE_MAX_CTAS),
                               1};
    check_num_tiles(op, head->num_row_tiles * num_n_tiles);
    return list_tiles<FusedMoeWorkTile>(
        schedule, fused_moe_num_work_tiles(words.data(), E, R, &order),
        [&](uint32_t index) { return fused_moe_work_tile(words.data(), ends.data(), E, R, &order, index); });
}

Tensor wgrad_tiles(const Tensor &schedule, const Tensor &offs, int64_t weight_tiles,
                   int64_t slices_per_tile) {
    const char *op = "wgrad_tiles";
    Ints ends = checked_offs(op, offs), words = checked_schedule(op, schedule, ends);
    int32_t E = static_cast<int32_t>(ends.size()), R = num_rows(ends);
    const FusedMoeScheduleHead *head = fused_moe_schedule_head(words.data());
    FusedMoeWgradOrder order = {
        checked_size(op, "weight_tiles", weight_tiles, 1, INT32_MAX), head->slice_rows,
        checked_size(op, "slices_per_tile", slices_per_tile, 0, MAX_ROWS / head->slice_rows)};
    check_num_tiles(op, (order.slices_per_tile ? head->num_slices : E) * weight_tiles);
    return list_tiles<FusedMoeWgradTile>(
        schedule, fused_moe_num_wgrad_tiles(words.data(), E, R, &order),
        [&](uint32_t index) { return fused_moe_wgrad_tile(words.data(), ends.data(), E, R, &order, index); });
}

/* The number of full tiles, and of the CTAs that have the skinny ones to themselves; of all tiles, and 0,
 * where no CTA has. */
std::tuple<int64_t, int64_t> share_tiles(const Tensor &schedule, const Tensor &offs, int64_t num_n_tiles,
                                         int64_t ctas) {
    const char *op = "share_tiles";
    Ints ends = checked_offs(op, offs), words = checked_schedule(op, schedule, ends);
    FusedMoeTileOrder order =
        fused_moe_default_order(checked_size(op, "num_n_tiles", num_n_tiles, 1, INT32_MAX), 0);
    order.tile_rows = fused_moe_schedule_head(words.data())->tile_rows;
    check_num_tiles(op, fused_moe_schedule_head(words.data())->num_row_tiles * num_n_tiles);
    FusedMoeTileShares shares =
        fused_moe_share_tiles(words.data(), static_cast<int32_t>(ends.size()), num_rows(ends), &order,
                              static_cast<uint32_t>(checked_size(op, "ctas", ctas, 1, FUSED_MOE_MAX_CTAS)));
    return {shares.num_full, shares.skinny_ctas};
}

/* The tile that a CTA claims next; num_tiles or more: there are none left. `assignment` is a number of
 * FusedMoeAssignment (csrc/schedule.h). The last skinny_ctas CTAs have tiles [num_full, num_tiles), the
 * others those before. The state (3, CTAs) is zeros at first. Its rows are the CTAs' `claimed` counters, then
 * their schedulers' `next`, and a phase: 0 before the first call, 1 with has_assigned, 2 without. */
int64_t next_tile(Tensor state, int64_t num_tiles, int64_t cta, int64_t assignment, int64_t num_full,
                  int64_t skinny_ctas) {
    const char *op = "next_tile";
    check_int32(op, "state", state, 2);
    if (state.size(0) != 3 || !state.is_contiguous())
        fail(op, "expected a contiguous state of 3 rows, found ", state.size(0));
    int32_t ctas = checked_size(op, "CTAs in state", state.size(1), 1, FUSED_MOE_MAX_CTAS);
    check_size(op, "cta", cta, 0, ctas - 1);
    check_size(op, "num_tiles", num_tiles, 0, INT32_MAX);
    check_size(op, "assignment", assignment, FUSED_MOE_STATIC, FUSED_MOE_IN_TURN);
    FusedMoeAssignment assigned = static_cast<FusedMoeAssignment>(assignment);
    uint32_t *claimed = static_cast<uint32_t *>(state.mutable_data_ptr());
    uint32_t &next = claimed[ctas + cta], &phase = claimed[2 * ctas + cta];
    uint32_t all = static_cast<uint32_t>(num_tiles), own = static_cast<uint32_t>(cta);
    uint32_t grid = static_cast<uint32_t>(ctas);
    FusedMoeTileShares tiles = fused_moe_equal_shares(all);
    if (checked_size(op, "skinny_ctas", skinny_ctas, 0, ctas - 1)) {
        tiles.num_full = static_cast<uint32_t>(checked_size(op, "num_full", num_full, 0, num_tiles));
        tiles.skinny_ctas = static_cast<uint32_t>(skinny_ctas);
    }
    FusedMoeTileScheduler scheduler = {claimed, tiles, own, grid, next, phase == 1, all > grid, assigned};
    if (phase == 0) scheduler = fused_moe_tile_scheduler(claimed, tiles, own, grid, assigned);
    uint32_t index = fused_moe_next_tile(&scheduler);
    next = scheduler.next;
    phase = scheduler.has_assigned ? 1 : 2;
    return index;
}

std::tuple<int64_t, int64_t, bool> default_order() {
    FusedMoeTileOrder order = fused_moe_default_order(1, 0);
    return {FUSED_MOE_TILE_ROWS, order.group, order.interleave != 0};
}

} // namespace

#ifndef FUSED_MOE_NAMESPACE
#define FUSED_MOE_NAMESPACE fused_moe /* setup.py's FUSED_MOE_NAMESPACE: another copy in the same process */
#endif

/* For tests and tools alone. */
STABLE_TORCH_LIBRARY_FRAGMENT(FUSED_MOE_NAMESPACE, m) {
    m.def("tile_schedule(Tensor offs, int tile_rows, int slice_rows) -> Tensor");
    m.def("work_tiles(Tensor schedule, Tensor offs, int num_n_tiles, int group, bool interleave, int "
          "split_last_wave) "
          "-> Tensor");
    m.def("wgrad_tiles(Tensor schedule, Tensor offs, int weight_tiles, int slices_per_tile) -> Tensor");
    m.def("share_tiles(Tensor schedule, Tensor offs, int num_n_tiles, int ctas) -> (int num_full, int "
          "skinny_ctas)");
    m.def("next_tile(Tensor(a!) state, int num_tiles, int cta, int assignment=0, int num_full=0, int "
          "skinny_ctas=0) -> int");
    m.def("default_order() -> (int tile_rows, int group, bool interleave)");
}

/* Not CPU: that key is for a layer's operators, which have a CUDA, a fake and an autograd kernel, too. */
STABLE_TORCH_LIBRARY_IMPL(FUSED_MOE_NAMESPACE, CompositeExplicitAutograd, m) {
    REGISTER(m, tile_schedule);
    REGISTER(m, work_tiles);
    REGISTER(m, wgrad_tiles);
    REGISTER(m, share_tiles);
    REGISTER(m, next_tile);
    m.impl("default_order", TORCH_BOX(&default_order));
}

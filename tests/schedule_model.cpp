/* The tile scheduler of csrc/schedule.h, and reset_claims of the sm90 tier, where every atomic step is a
 * choice.
 *
 *   schedule_model explore          all interleavings of small runs
 *   schedule_model threads LAUNCHES larger runs in threads with real atomics
 *
 * test_schedule_model.py compiles this with a copy of schedule.h, in which only the two macros of atomic
 * steps differ: they call claim and peek below. reset_claims.h is the kernel's function, copied from
 * tile_queue.cuh.
 *
 * Whichever CTAs start, and however long each of them waits before any step:
 *   - no tile is computed twice, and no CTA exits while a tile is unclaimed;
 *   - each CTA exits after a bounded number of its own steps, so it never waits for another;
 *   - if all CTAs have exited, all tiles are computed and all counters are zeros, as the next launch expects.
 * If no CTA has more than one tile, each computes its own and needs no counter: the tiles of CTAs that never
 * start are then not computed.
 *
 * A CTA is deterministic but for the values that its steps read. So its state is the scheduler between two
 * calls and the list of values read within the call. To take one step, the call is run again from its start:
 * it reads the listed values, takes the step, and leaves by longjmp at the next one, as C may. Exceptions
 * took four times as long in all. */
#include <algorithm>
#include <atomic>
#include <barrier>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

static uint32_t claim(uint32_t *counter);
static uint32_t peek(const uint32_t *counter);
static uint32_t put(uint32_t *counter, uint32_t value);

#include "schedule.h"

/* --- steps ---------------------------------------------------------------------------------------------- */

static jmp_buf next_step; /* back from the step after the one that was to be taken */

enum { MOST_STEPS = 40 /* of one call; more: it waits for another CTA */ };

struct Read { /* what a call's steps have read: small numbers */
    uint8_t num_steps = 0, value[MOST_STEPS];
};

struct Call { /* of one CTA; with real atomics there is none */
    Read *read;
    uint8_t replayed = 0;
    bool may_step = true;
};

static thread_local Call *call = nullptr;
static thread_local std::minstd_rand chance; /* with real atomics */

/* One step of the current call. */
template <typename Step>
static uint32_t take(Step step) {
    if (!call) {
        if (chance() % 4 == 0) std::this_thread::yield();
        return step();
    }
    Read *read = call->read;
    if (call->replayed < read->num_steps) return read->value[call->replayed++];
    if (!call->may_step || read->num_steps == MOST_STEPS) longjmp(next_step, 1);
    call->may_step = false;
    call->replayed++;
    return read->value[read->num_steps++] = static_cast<uint8_t>(step());
}

static uint32_t claim(uint32_t *counter) {
    return take([=] { return std::atomic_ref<uint32_t>(*counter).fetch_add(1, std::memory_order_relaxed); });
}

static uint32_t peek(const uint32_t *counter) {
    auto *shared = const_cast<uint32_t *>(counter);
    return take([=] { return std::atomic_ref<uint32_t>(*shared).load(std::memory_order_relaxed); });
}

static uint32_t put(uint32_t *counter, uint32_t value) {
    return take([=] { return std::atomic_ref<uint32_t>(*counter).exchange(value); });
}

/* --- the device as reset_claims sees it: a warp of one lane --------------------------------------------- */

enum { CLAIMED = 0, EXITED = FUSED_MOE_MAX_CTAS, NUM_COUNTERS };

struct Cell {
    uint32_t *counter;
    void operator=(uint32_t value) { put(counter, value); }
};

struct Counters {
    uint32_t *first;
    uint32_t *operator+(uint32_t i) const { return first + i; }
    Cell operator[](uint32_t i) const { return {first + i}; }
};

struct TileSource {
    Counters counters;
};

static uint32_t atomicInc(uint32_t *counter, uint32_t limit) {
    return take([=] {
        std::atomic_ref<uint32_t> shared(*counter);
        uint32_t old = shared.load();
        while (!shared.compare_exchange_weak(old, old >= limit ? 0 : old + 1)) {
        }
        return old;
    });
}

static thread_local struct {
    uint32_t x;
} gridDim;
static const struct {
    uint32_t x = 0;
} threadIdx;
#define __device__ static
#define __threadfence() std::atomic_thread_fence(std::memory_order_seq_cst)
#define __shfl_sync(mask, value, lane) (value)

#include "reset_claims.h" /* its lanes clear every 32nd counter each; here the loop's stride is 1 */

/* --- all interleavings ---------------------------------------------------------------------------------- */

enum { MAX_CTAS = 3, MAX_TILES = 6 };
const FusedMoeAssignment ASSIGNMENTS[] = {FUSED_MOE_STATIC, FUSED_MOE_ROTATED, FUSED_MOE_IN_TURN};
enum Stage : uint8_t { STARTING, FETCHING, EXITING, GONE };

struct Cta { /* between two steps */
    Stage stage = STARTING;
    uint8_t next = 0;
    bool has_assigned = false;
    Read read; /* by the current call */
};

struct State {
    uint8_t claimed[MAX_CTAS] = {}, exited = 0, computed = 0; /* computed: one bit per tile */
    Cta ctas[MAX_CTAS];

    std::string key() const {
        std::string key(claimed, claimed + MAX_CTAS);
        key += {static_cast<char>(exited), static_cast<char>(computed)};
        for (const Cta &cta : ctas) {
            auto first = reinterpret_cast<const char *>(&cta);
            key.append(first, offsetof(Cta, read.value) + cta.read.num_steps);
        }
        return key;
    }
};

static void fail(const char *what, uint32_t ctas, uint32_t tiles) {
    printf("%s, with %u CTAs and %u tiles\n", what, ctas, tiles);
    fflush(stdout);
    _Exit(1); /* from any thread */
}

/* One call of a CTA. Returns whether it came to its end. */
static bool run_call(Stage stage, FusedMoeTileScheduler *scheduler, uint32_t *tile) {
    if (setjmp(next_step)) return false;
    if (stage == STARTING)
        *scheduler = fused_moe_tile_scheduler(scheduler->claimed, scheduler->tiles, scheduler->cta,
                                              scheduler->ctas, scheduler->assignment);
    else if (stage == FETCHING)
        *tile = fused_moe_next_tile(scheduler);
    else if (scheduler->claims)
        reset_claims({{scheduler->claimed}});
    return true;
}

/* The state after one step of a CTA. */
static void advance(State *state, uint32_t index, uint32_t num_ctas, FusedMoeTileShares tiles,
                    FusedMoeAssignment assignment) {
    const uint32_t num_tiles = tiles.num;
    uint32_t counters[NUM_COUNTERS] = {};
    std::copy_n(state->claimed, num_ctas, counters + CLAIMED);
    counters[EXITED] = state->exited;
    gridDim.x = num_ctas;

    Cta *cta = &state->ctas[index];
    bool claims = num_tiles > num_ctas;
    FusedMoeTileScheduler scheduler = {counters,          tiles,  index,     num_ctas, cta->next,
                                       cta->has_assigned, claims, assignment};
    uint32_t tile = 0;
    Call current = {&cta->read};
    call = &current;
    bool returned = run_call(cta->stage, &scheduler, &tile);
    call = nullptr;
    std::copy_n(counters + CLAIMED, num_ctas, state->claimed);
    state->exited = static_cast<uint8_t>(counters[EXITED]);
    if (current.may_step && !returned) fail("a CTA takes steps for ever", num_ctas, num_tiles);
    if (!returned) return;

    cta->read.num_steps = 0;
    cta->next = static_cast<uint8_t>(scheduler.next);
    cta->has_assigned = scheduler.has_assigned;
    if (cta->stage == STARTING) {
        cta->stage = FETCHING;
    } else if (cta->stage == EXITING) {
        cta->stage = GONE;
    } else if (tile < num_tiles) {
        if (state->computed >> tile & 1) fail("a tile is computed twice", num_ctas, num_tiles);
        state->computed |= static_cast<uint8_t>(1 << tile);
    } else {
        if (assignment == FUSED_MOE_IN_TURN) scheduler.ctas = 1;
        for (uint32_t other = 0; claims && other < scheduler.ctas; other++)
            if (state->claimed[other] < fused_moe_num_assigned(&scheduler, other))
                fail("a CTA exits while a tile is unclaimed", num_ctas, num_tiles);
        cta->stage = EXITING;
        cta->next = 0; /* no longer read */
    }
}

/* All states that the CTAs of `present`, one bit each, can reach. Returns their number. */
static size_t explore(uint32_t num_ctas, uint32_t present, FusedMoeTileShares shares,
                      FusedMoeAssignment assignment) {
    const uint32_t num_tiles = shares.num;
    std::unordered_set<std::string> seen;
    std::vector<State> open(1);
    seen.insert(open.back().key());
    while (!open.empty()) {
        State state = std::move(open.back());
        open.pop_back();
        bool ended = true;
        for (uint32_t index = 0; index < num_ctas; index++) {
            if (!(present >> index & 1) || state.ctas[index].stage == GONE) continue;
            ended = false;
            State next = state;
            advance(&next, index, num_ctas, shares, assignment);
            if (seen.insert(next.key()).second) open.push_back(std::move(next));
        }
        if (!ended) continue;
        uint32_t tiles = (1u << num_tiles) - 1, computed = num_tiles > num_ctas ? tiles : tiles & present;
        if (state.computed != computed) fail("a tile is not computed", num_ctas, num_tiles);
        if (present != (1u << num_ctas) - 1) continue;
        for (uint32_t index = 0; index < num_ctas; index++)
            if (state.claimed[index]) fail("a counter is not zero again", num_ctas, num_tiles);
        if (state.exited) fail("the counter of exits is not zero again", num_ctas, num_tiles);
    }
    return seen.size();
}

static void explore_all(void) {
    size_t states = 0;
    for (uint32_t ctas = 1; ctas <= MAX_CTAS; ctas++)
        for (uint32_t tiles = 0; tiles <= MAX_TILES; tiles++)
            for (uint32_t present = 1; present < 1u << ctas; present++) {
                for (FusedMoeAssignment assignment : ASSIGNMENTS)
                    states += explore(ctas, present, fused_moe_equal_shares(tiles), assignment);
                for (uint32_t full = 1; tiles > ctas && full < tiles; full++)
                    for (uint32_t skinny_ctas = 1; skinny_ctas < ctas; skinny_ctas++)
                        states += explore(ctas, present, {tiles, full, skinny_ctas}, ASSIGNMENTS[full % 2]);
            }
    printf("%zu states\n", states);
}

/* --- real atomics --------------------------------------------------------------------------------------- */

/* One launch after another on the same counters. A launch has more CTAs than threads, or fewer: a thread
 * whose CTA has exited runs the next one that has not started. */
static void run_threads(int num_launches) {
    const uint32_t NUM_THREADS = 8, MOST_CTAS = 24, MOST_TILES = 200;
    static uint32_t counters[NUM_COUNTERS];
    static std::atomic<uint32_t> times_computed[MOST_TILES], started;
    uint32_t num_ctas = 0, num_tiles = 0;
    uint64_t total = 0;
    int launches = 0;
    std::minstd_rand sizes;

    auto check_and_prepare = [&]() noexcept {
        for (uint32_t tile = 0; tile < num_tiles; tile++) {
            uint32_t times = times_computed[tile].exchange(0);
            if (times > 1) fail("a tile is computed twice", num_ctas, num_tiles);
            if (!times) fail("a tile is not computed", num_ctas, num_tiles);
        }
        for (uint32_t counter : counters)
            if (counter) fail("a counter is not zero again", num_ctas, num_tiles);
        total += num_tiles;
        num_ctas = 1 + sizes() % MOST_CTAS;
        num_tiles = sizes() % (MOST_TILES + 1);
        started = 0;
        launches++;
    };
    /* run by one thread when all have arrived */
    std::barrier launch(NUM_THREADS, check_and_prepare);
    auto run_ctas = [&](uint32_t seed) {
        chance.seed(seed + 1);
        for (launch.arrive_and_wait(); launches <= num_launches; launch.arrive_and_wait()) {
            gridDim.x = num_ctas;
            for (uint32_t cta; (cta = started++) < num_ctas;) {
                FusedMoeAssignment assignment = ASSIGNMENTS[launches % 3];
                FusedMoeTileShares shares = fused_moe_equal_shares(num_tiles);
                if (assignment != FUSED_MOE_IN_TURN && num_tiles > num_ctas)
                    shares = {num_tiles, num_tiles / 3, launches % num_ctas};
                if (!shares.skinny_ctas) shares.num_full = num_tiles;
                FusedMoeTileScheduler scheduler =
                    fused_moe_tile_scheduler(counters, shares, cta, num_ctas, assignment);
                for (uint32_t tile; (tile = fused_moe_next_tile(&scheduler)) < num_tiles;)
                    times_computed[tile]++;
                if (scheduler.claims) reset_claims({{counters}});
            }
        }
    };
    std::vector<std::jthread> threads;
    for (uint32_t i = 0; i < NUM_THREADS; i++) threads.emplace_back(run_ctas, i);
    threads.clear();
    printf("%llu tiles\n", static_cast<unsigned long long>(total));
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "explore"))
        explore_all();
    else if (argc == 3 && !strcmp(argv[1], "threads"))
        run_threads(atoi(argv[2]));
    else
        return 2;
}

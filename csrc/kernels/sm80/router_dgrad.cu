/* The gradient of the router's input: dx = dlogits weight, a grouped GEMM of one expert that has all rows. */
#include "../common/schedule.cuh"
#include "../dispatch.cuh"

namespace fused_moe::sm80 {
namespace {

size_t workspace(const FusedMoeRouterDgrad &) {
    return checked_offsets_bytes(1);
}

int run(const FusedMoeRouterDgrad &p, void *stream) {
    FusedMoeGroupedMM q = {};
    q.a = p.dlogits;
    q.b[0] = {(void *)p.weight, 0, 1, p.D};
    q.out = p.dx;
    q.R = p.T;
    q.M = p.D;
    q.N[0] = p.E;
    q.E = 1;
    q.dtype = p.dtype;
    int status = check_offsets(&q.offs, &q.schedule, 1, p.T, p.workspace.data, stream);
    return status == FUSED_MOE_OK ? grouped_mm.run(q, stream) : status;
}

} // namespace

const Kernel<FusedMoeRouterDgrad> router_dgrad = {nullptr, workspace, run};

} // namespace fused_moe::sm80

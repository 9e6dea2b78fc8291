/* router_dgrad: dlogits weight, a grouped GEMM of one expert that has all rows. */
#include "cpu.h"

int fused_moe_cpu_router_dgrad(const FusedMoeRouterDgrad *p) {
    const int32_t offs[] = {(int32_t)p->T};
    FusedMoeGroupedMM q = {0};
    q.a = p->dlogits;
    q.b[0] = (FusedMoeWeight){(void *)p->weight, 0, 1, p->D};
    q.out = p->dx;
    q.offs = offs;
    q.R = p->T;
    q.M = p->D;
    q.N[0] = p->E;
    q.E = 1;
    q.dtype = p->dtype;
    return fused_moe_cpu_grouped_mm(&q);
}

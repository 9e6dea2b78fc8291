/* Which plans one cluster of CTAs makes in one launch, together with the choice of their ids where there is one
 * (kernels/sm90/cluster_plan.cu), and how their slots are spread over its CTAs.
 *
 * Fewer slots are planned by the GEMMs (slot_plan.h). More take longer on the SMs of a cluster than two or three
 * launches on all of them, and so do more tokens that choose.
 *
 * Plain C: dispatch, kernel and tests call the same functions. */
#ifndef FUSED_MOE_CLUSTER_PLAN_H
#define FUSED_MOE_CLUSTER_PLAN_H

#include "fused_moe.h"
#include "slot_plan.h"

enum {
    FUSED_MOE_CLUSTER_CTAS = 8, /* the largest cluster that every GPU with clusters runs */
    FUSED_MOE_CLUSTER_SLOTS = 8192,
    FUSED_MOE_CLUSTER_CHOICES = 4096, /* slots, where their experts are chosen, too */
    FUSED_MOE_CLUSTER_EXPERTS = 1024,
    FUSED_MOE_SPAN_SLOTS = FUSED_MOE_CLUSTER_SLOTS / FUSED_MOE_CLUSTER_CTAS, /* of one CTA, at most */
};

/* Slots of a CTA's span: consecutive ones, and those of whole tokens where it chooses their experts. The last
 * spans may be shorter, or empty. */
FUSED_MOE_FN int64_t fused_moe_span_slots(int64_t T, int64_t K, bool chooses) {
    int64_t together = chooses ? K : 1, parts = chooses ? T : T * K;
    return (parts + FUSED_MOE_CLUSTER_CTAS - 1) / FUSED_MOE_CLUSTER_CTAS * together;
}

/* route: what chooses the ids; NULL: they are given. */
FUSED_MOE_FN bool fused_moe_has_cluster_plan(const FusedMoeRoutePlan *p, const FusedMoeRoute *route) {
    int64_t num_slots = p->T * p->K, span_slots = fused_moe_span_slots(p->T, p->K, route != NULL);
    return FUSED_MOE_FEW_SLOTS < num_slots &&
           num_slots <= (route ? FUSED_MOE_CLUSTER_CHOICES : FUSED_MOE_CLUSTER_SLOTS) &&
           p->E <= FUSED_MOE_CLUSTER_EXPERTS && !(route && route->dtype == FUSED_MOE_F64) &&
           span_slots <= FUSED_MOE_SPAN_SLOTS;
}

#endif

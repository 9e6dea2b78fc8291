"""torchtitan's token dispatchers: rows grouped by expert with counts, whichever library moves them.

`experts` takes what its RoutedExperts has: tokens, scores, ids, a dispatcher with its meshes wired, and the
weights of this rank's experts. In torchtitan itself the overrides of fused_moe.torchtitan do this.
"""

import fused_moe


def experts(x, w1, w2, w3, scores, ids, dispatcher, **options):
    counts = fused_moe.route_plan(ids, dispatcher.num_experts).counts
    x_rows, counts, metadata = dispatcher.dispatch(x, scores, ids, counts)
    y_rows = fused_moe.grouped_mlp(x_rows, w1, w2, w3, counts, **options)  # rows past the counts may be there
    return dispatcher.combine(y_rows, metadata, x)

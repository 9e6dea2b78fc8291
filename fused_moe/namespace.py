"""The namespace of this copy's operators, torch.ops.NAMESPACE.

A copy that tools/hub.py writes has another, so that it and an installed package can be in one process.
"""

NAMESPACE = "fused_moe"  # as the library was compiled: FUSED_MOE_NAMESPACE of setup.py

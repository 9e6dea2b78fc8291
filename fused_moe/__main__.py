"""python -m fused_moe: prints fused_moe.info()."""

from .info import info

print(info())

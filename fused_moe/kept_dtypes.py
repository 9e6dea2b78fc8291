"""Tensors that keep their dtype, whatever their module is cast to or loaded from."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class KeepsDtypes(nn.Module):
    """A module some of whose own tensors keep their dtype under `.to`, `.half()` and other casts, and when
    `load_state_dict(assign=True)` would take a checkpoint's."""

    def _kept_dtypes(self) -> dict[str, torch.dtype]:
        """{name of an own parameter or buffer: the dtype that it keeps}."""
        return {}

    def _apply(self, fn, recurse=True):
        kept = {}  # id of a tensor -> itself, whose id would be used again if it were freed, and its dtype
        for name, dtype in self._kept_dtypes().items():
            tensor = self._parameters.get(name, self._buffers.get(name))
            for t in (tensor, tensor.grad if isinstance(tensor, nn.Parameter) else None):
                if t is not None:
                    kept[id(t)] = (t, dtype)

        def apply(t):
            result = fn(t)
            _, dtype = kept.get(id(t), (None, result.dtype))
            return result if result.dtype == dtype else t.to(result.device, dtype)

        return super()._apply(apply, recurse)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name, dtype in self._kept_dtypes().items():
            if isinstance(state_dict.get(prefix + name), Tensor):
                state_dict[prefix + name] = state_dict[prefix + name].to(dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)

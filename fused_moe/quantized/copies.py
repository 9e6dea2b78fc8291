"""Copies: what a weight in tiles gives away as its published tensors. Whether one was written is noticed."""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import fail, has_memory


class _Copy(NamedTuple):
    name: str
    tensor: weakref.ref
    counter: Tensor  # without memory; its version is the copy's
    version: int

    @property
    def is_written(self) -> bool:
        return self.counter._version != self.version


class Copies:
    """The copies of one weight. PyTorch's state_dict shares the parameters' memory, so writing into it writes
    the parameters; a write into these copies would be lost. It is an error at the weight's next use, unless
    load_state_dict wrote a tensor of that name since. A write through `.data` is not noticed.
    """

    def __init__(self):
        self._given: list[_Copy] = []

    def give(self, name: str, tensor: Tensor) -> Tensor:
        if has_memory(tensor) and not tensor.is_inference():
            self._given = [copy for copy in self._given if copy.is_written or copy.tensor() is not None]
            counter = tensor.detach()
            counter.data = counter.new_empty(0)
            self._given.append(_Copy(name, weakref.ref(tensor), counter, counter._version))
        return tensor

    def forget(self, names: Container[str]) -> None:
        """Writes until now into copies of these names."""
        for i, copy in enumerate(self._given):
            if copy.name in names:
                self._given[i] = copy._replace(version=copy.counter._version)

    def check(self) -> None:
        if torch.compiler.is_compiling():
            return
        for copy in self._given:
            if copy.is_written:
                expected = f"{copy.name} of a weight in tiles to be written by load_state_dict"
                found = "a write into a copy that state_dict() or the weight gave"
                fail(ValueError, "QuantizedWeight", expected, found)

    def __deepcopy__(self, memo):
        self.check()
        return Copies()

    def __reduce__(self):
        self.check()
        return Copies, ()

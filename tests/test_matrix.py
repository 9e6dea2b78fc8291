"""Kinds of layers times wrappers: a cell gives right results, or the error that ERRORS names with its reason.

matrix/kinds.py has the kinds, matrix/wrappers.py the wrappers. `python tests/test_matrix.py` writes its
part of docs/testing.md. With FUSED_MOE_TEST_PACKAGES=1 only those cells run that need a package; where it
is missing they fail.
"""

import os
import pickle
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # as a program

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from matrix import tables  # noqa: E402
from matrix.kinds import KINDS  # noqa: E402
from matrix.tables import Error  # noqa: E402
from matrix.wrappers import WRAPPERS, Case  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
PACKAGES = os.environ.get("FUSED_MOE_TEST_PACKAGES") == "1"

EVERY = tuple(KINDS)
FP8 = ("fp8_block", "fp8", "fp8 + LoRA")
OF_INTEGERS = tuple(name for name, kind in KINDS.items() if kind.format in ("int8", "int4", "mxfp4"))


def on_gloo(device: torch.device) -> bool:
    return device.type == "cpu"


def before_2_13(device: torch.device) -> bool:
    return torch.__version__ < (2, 13)


def unpickled_float8_fails(_) -> bool:
    try:
        pickle.loads(pickle.dumps(torch.zeros(1).to(torch.float8_e4m3fn)))
    except AttributeError:
        return True
    return False


FSDP2_OF_OLD = (
    "Before PyTorch 2.13, whose `fully_shard` takes floating parameters alone, and casts all under a policy."
)

# (kinds, wrapper) -> the error of these cells.
ERRORS = {
    (EVERY, "freed storage"): Error(RuntimeError, "storage.*(freed|size 0)", "There is nothing to read."),
    (EVERY, "half loaded"): Error(ValueError, "meta", "There are no values."),
    (FP8, "DDP"): Error(
        RuntimeError, "Invalid scalar type", "On gloo, which broadcasts no float8; NCCL does.", on_gloo
    ),
    (FP8, "pickle"): Error(
        AttributeError,
        "UntypedStorage",
        "Where `pickle` of PyTorch's own float8 tensors does not load; `torch.save` does.",
        unpickled_float8_fails,
    ),
    (OF_INTEGERS, "FSDP2"): Error(RuntimeError, "floating point dtype", FSDP2_OF_OLD, before_2_13),
    (OF_INTEGERS, "FSDP2, policy"): Error(RuntimeError, "floating point dtype", FSDP2_OF_OLD, before_2_13),
    (FP8, "FSDP2, policy"): Error(RuntimeError, "Float8", FSDP2_OF_OLD, before_2_13),
}
EXPECTED = {(kind, wrapper): error for (kinds, wrapper), error in ERRORS.items() for kind in kinds}


def needs(kind: str, wrapper: str) -> list[str]:
    """The packages of a cell."""
    return [package for package in (KINDS[kind].needs, WRAPPERS[wrapper].needs) if package]


def cells():
    """A diagonal is quick, where neither a package nor inductor is needed."""
    plain = [name for name, kind in KINDS.items() if not kind.needs]
    for i, wrapper in enumerate(WRAPPERS):
        for kind in KINDS:
            if PACKAGES and not needs(kind, wrapper):
                continue
            is_quick = kind == plain[i % len(plain)] and wrapper != "compile, inductor"
            is_quick = is_quick and not WRAPPERS[wrapper].needs
            yield pytest.param(
                kind, wrapper, id=f"{kind}-{wrapper}", marks=pytest.mark.quick if is_quick else ()
            )


@pytest.fixture(scope="module")
def process_group(device):
    """One rank, in this process."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("kind", "wrapper"), list(cells()))
def test_cell(request, device, tmp_path, kind, wrapper):
    for package in needs(kind, wrapper):
        if find_spec(package) is None:
            (pytest.fail if PACKAGES else pytest.skip)(f"{package} is not installed")
    if WRAPPERS[wrapper].distributed:
        request.getfixturevalue("process_group")
    error = EXPECTED.get((kind, wrapper))
    if error is not None and error.when is not None and not error.when(device):
        error = None
    attempts = WRAPPERS[wrapper].attempts(Case(KINDS[kind], device, tmp_path))
    for attempt in attempts:
        with nullcontext() if error is None else pytest.raises(error.type, match=error.match):
            attempt()


def test_errors_are_of_cells(cpu):
    """No entry of the table is idle, and none is hidden by another."""
    cells = [(kind, wrapper) for kinds, wrapper in ERRORS for kind in kinds]
    assert set(cells) <= {(kind, wrapper) for kind in KINDS for wrapper in WRAPPERS}
    assert len(cells) == len(set(cells))


@pytest.mark.skipif(not tables.PAGE.exists(), reason="needs docs/ beside tests/")
def test_docs(cpu):
    """The page's part is that of this file; `python tests/test_matrix.py` writes them."""
    assert tables.in_page(tables.PAGE.read_text()) == tables.text(ERRORS)


if __name__ == "__main__":
    tables.write(ERRORS)

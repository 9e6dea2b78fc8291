"""What every test shares: the device, the seed, the markers and the hypothesis profiles."""

import os
import sys
import zlib
from collections import Counter
from functools import cache
from pathlib import Path

# Before torch is imported: waiting threads sleep. Spinning threads make every parallel region fifty times
# slower when another process shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The workspace that deterministic cuBLAS needs, also with several streams; else every GEMM warns.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))  # so that `import cases` works from any folder

CUDA_TESTS = Path(__file__).parent / "cuda"
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("local", max_examples=20, **COMMON)
settings.register_profile("ci", max_examples=20, derandomize=True, **COMMON)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device that the suite runs on: cpu, cuda, ...")
    parser.addoption("--seed", default=0, type=int, help="another seed draws other inputs")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line(
        "markers", "quick(one_in=1): a small part of every subject; of a test's items every N-th alone"
    )
    config.addinivalue_line("markers", "sanitizer: every kernel once on tiny shapes, for compute-sanitizer")
    # The for-loop reference multiplies and accumulates in full float32, whatever the environment says.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def pytest_report_header(config):
    return f"device: {config.option.device}, seed: {config.option.seed}, torch {torch.__version__}"


NEED_CUDA = pytest.StashKey[int]()  # tests that were left out, as they need a CUDA device


def on_cuda(config) -> bool:
    return config.option.device.startswith("cuda")


def pytest_ignore_collect(collection_path, config):
    """tests/cuda costs nothing without a CUDA device, unless its files are named, and with -m quick none
    without such a test is imported."""
    if collection_path == CUDA_TESTS:
        return None if on_cuda(config) else True
    is_test = config.option.markexpr == "quick" and collection_path.match("test_*.py")
    return True if is_test and "mark.quick" not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    """Takes the marker quick from the items that it leaves out. Tests that need a CUDA device are one line of
    the report, not a skip each."""
    seen = Counter()
    for item in items:
        mark = item.get_closest_marker("quick")
        if mark is not None and "one_in" in mark.kwargs:
            function = item.nodeid.partition("[")[0]
            if seen[function] % mark.kwargs["one_in"]:
                item.own_markers.remove(mark)
            seen[function] += 1
    if on_cuda(config):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[NEED_CUDA] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """A process of xdist says how many it has left out; each collects every test."""
    node.config.stash[NEED_CUDA] = getattr(node, "workeroutput", {}).get("need_cuda", 0)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["need_cuda"] = session.config.stash.get(NEED_CUDA, 0)


def pytest_terminal_summary(terminalreporter, config):
    """No skip without a printed reason: how many tests each has, not where each of them is, as -rs lists."""
    if count := config.stash.get(NEED_CUDA, 0):
        terminalreporter.line(f"{count} tests, and tests/cuda, need a CUDA device: run with --device cuda")
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skipped tests and why")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5d}  {reason}")


@pytest.fixture(scope="session")
def device(request):
    """The device under test."""
    return torch.device(request.config.option.device)


@pytest.fixture(scope="session")
def cpu(device):
    """For tests of the CPU tier only, or of code that does not depend on the device."""
    if device.type != "cpu":
        pytest.skip("for --device cpu alone: its threads and checks of values, the reference, the build")
    return device


@pytest.fixture(scope="session")
def fp8(device):
    """Where FP8 training runs: on the CPU, and on the sm90 tier."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) != (9, 0):
            pytest.skip(f"FP8 training needs compute capability 9.0, found {major}.{minor}")
        if os.environ.get("FUSED_MOE_TIER") == "portable":
            pytest.skip("FP8 training has no portable tier")


@pytest.fixture(scope="session")
def drawn_calls(request, device):
    """operator_calls of a case, drawn once for all tests that only read them: they are the calls of every
    operator, and take a tenth of a second. They depend on the case and --seed alone."""
    from cases import operator_calls

    @cache
    def drawn(case) -> dict:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(zlib.crc32(repr(case).encode()) + request.config.option.seed)
            return operator_calls(case, device)

    return drawn


@pytest.fixture(autouse=True)
def seed(request):
    """Every test has its own random inputs, the same in every run with the same --seed."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()) + request.config.option.seed)


@pytest.fixture(autouse=True)
def transformers_registry():
    """Assignment to transformers' registry of experts hides later `register` calls, and monkeypatch.setitem
    restores by assignment: patch its _global_mapping."""
    yield
    if moe := sys.modules.get("transformers.integrations.moe"):
        assert not moe.ALL_EXPERTS_FUNCTIONS._local_mapping


@pytest.fixture(scope="module")
def poison():
    """Fills new memory with NaN, or the largest integer, so that unwritten elements show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def tiling(monkeypatch):
    """Quantised weights are kept in tiles on the CPU, too. Its operators do not read those."""
    from fused_moe.quantized import tiles

    monkeypatch.setattr(tiles, "are_read_on", lambda device: device.type != "meta")


@pytest.fixture
def threads():
    """torch.set_num_threads, restored afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_rank(device):
    """The mesh of a process group of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device.type, (1,))
    dist.destroy_process_group()

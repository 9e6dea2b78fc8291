"""tools/hub.py: the layout of Hugging Face's kernels hub, and what is loaded from it.

Kernels are loaded by `kernels.get_local_kernel` in processes of their own, where no fused_moe is imported:
the library at hand has the operators' usual namespace. Skipped without a checkout; what loads a kernel also
without the package `kernels`.
"""

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fused_moe.ops import LIBRARY

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "tools" / "hub.py").exists(), reason="not in a checkout")


def load(path: Path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "repository"
    command = [sys.executable, ROOT / "tools" / "hub.py", out, "--library", LIBRARY, "--kernel-version", "3"]
    subprocess.run(command, check=True)
    return out


def variants(repository: Path) -> list[Path]:
    return sorted((repository / "build").iterdir())


def in_a_kernel(repository: Path, code: str, *packages: str) -> None:
    """Runs code in a process that has loaded the CPU's variant as `kernel`, whatever PyTorch's build."""
    for package in ("kernels", *packages):
        pytest.importorskip(package)
    head = f"""
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
repository = Path({str(repository)!r})
kernel = get_local_kernel(repository, backend="cpu")
"""
    tail = "\nassert not [name for name in sys.modules if name.split('.')[0] == 'fused_moe']"
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", head + code + tail], check=True, env=environment)


def test_a_variant_for_each_backend(repository):
    """A library with GPU kernels is in two: PyTorch's CPU builds ask for that of the CPU."""
    hub = load(ROOT / "tools" / "hub.py")
    found = {path.name: json.loads((path / "metadata.json").read_text()) for path in variants(repository)}
    assert f"torch-stable-abi210-cpu-{hub.SYSTEM}" in found
    ids = {metadata["id"] for metadata in found.values()}
    assert len(ids) == len(found) and all(name.isidentifier() for name in ids)
    for metadata in found.values():
        assert (metadata["name"], metadata["version"], metadata["python-depends"]) == ("fused-moe", 3, [])
    build = {
        "gpu_targets": "sm_80 compute_80 sm_90a",
        "nvcc": "Cuda compilation tools, release 13.0, V13.0.88",
    }
    assert hub.backends_of(build) == {
        "cpu": {"type": "cpu"},
        "cu130": {"type": "cuda", "archs": ["8.0", "8.0+PTX", "9.0a"]},
    }
    assert hub.backends_of({"gpu_targets": "none", "nvcc": "none"}) == {"cpu": {"type": "cpu"}}


def test_other_folders_stay(repository, tmp_path):
    """A repository is written again; a `build` of something else is not removed, nor the checkout's."""
    program = [sys.executable, ROOT / "tools" / "hub.py"]
    again = shutil.copytree(repository, tmp_path / "again")
    (again / "build" / "older").mkdir()
    subprocess.run([*program, again, "--library", LIBRARY], check=True)
    assert [path.name for path in variants(again)] == [path.name for path in variants(repository)]
    (again / "build.toml").unlink()
    for out in (again, ROOT):
        run = subprocess.run([*program, out, "--library", LIBRARY], capture_output=True, text=True)
        assert run.returncode and "tools/hub.py: expected" in run.stderr
    assert variants(again)


def test_a_variant_holds_what_its_files_import(repository):
    """Every relative import, also those of functions, is of a file that is there."""
    for variant in variants(repository):
        assert (variant / "_ops.so").read_bytes() == LIBRARY.read_bytes()
        for path in variant.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ImportFrom) or not node.level:
                    continue
                folder = [path, *path.parents][node.level]
                module = folder.joinpath(*(node.module or "").split("."))
                names = [module] if node.module else [folder / alias.name for alias in node.names]
                for name in names:
                    is_there = name.with_suffix(".py").exists() or (name / "__init__.py").exists()
                    assert is_there or folder == variant and not node.module, (path, ast.unparse(node))


def test_the_hub_reads_the_layout(repository):
    rust = pytest.importorskip("kernels._rust")
    assert [str(b) for b in rust.Build.open(str(repository)).general.backends][0] == "cpu"
    for variant in variants(repository):
        rust.Metadata.read_from_file(variant / "metadata.json")
    from kernels.variants import parse_variant

    for name in ("torch-stable-abi210-cpu-x86_64-linux", "torch-stable-abi210-cu130-x86_64-linux"):
        assert parse_variant(name).variant_str == name


def test_a_namespace_of_its_own():
    """The macro reaches every registration, and the copy of the Python files is given the same name."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    flags = ["-std=c++20", "-E", "-P", "-DFUSED_MOE_NAMESPACE=another"]
    includes = [f"-I{ROOT}/csrc", f"-isystem{Path(torch.__file__).parent}/include"]
    macros = ["-DTORCH_TARGET_VERSION=0x020a000000000000ULL", "-DTORCH_STABLE_ONLY", "-DFUSED_MOE_WITH_CUDA"]
    for name, registrations in (("library.cpp", 4), ("planners.cpp", 2)):
        source = ROOT / "csrc" / "torch" / name
        code = subprocess.check_output([compiler, *flags, *macros, *includes, source], text=True)
        assert code.count('"another"') == registrations and '"fused_moe"' not in code


def test_files_name_the_namespace_of_the_library(tmp_path):
    hub = load(ROOT / "tools" / "hub.py")
    hub.copy_package(tmp_path, "another")
    assert load(tmp_path / "namespace.py").NAMESPACE == "another"
    for path in tmp_path.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.ops."):
                assert "fused_moe" not in ast.unparse(node), f"{path.name}:{node.lineno}"


def test_a_local_kernel(repository):
    in_a_kernel(
        repository,
        """
assert kernel.__name__.startswith("_fused_moe_cpu_")
torch.set_default_dtype(torch.float64)
x, logits = torch.randn(6, 16), torch.randn(6, 4)
w1, w2, w3 = torch.randn(4, 24, 16), torch.randn(4, 16, 24), torch.randn(4, 24, 16)
leaves = [t.requires_grad_() for t in (x, logits, w1, w2, w3)]
results = []
for functions in (kernel, kernel.reference):
    scores, ids = functions.route(logits, 2, route_norm=True)
    out = functions.fused_experts(x, w1, w2, w3, scores, ids)
    results.append((ids, out, *torch.autograd.grad(out.square().sum(), leaves)))
for ours, expected in zip(*results, strict=True):
    torch.testing.assert_close(ours, expected, check_dtype=False)
layer = kernel.FusedMoE(16, 24, 4, 2)
layer(x).sum().backward()
""",
    )


def test_shared_experts_are_refused():
    """They would be left out."""
    block = torch.nn.Module()
    block.shared_expert = torch.nn.Linear(8, 8)
    layers = load(ROOT / "tools" / "hub_layers.py")
    with pytest.raises(ValueError, match="expected no shared experts, found Module"):
        layers.FusedMoEBlock.forward(block, torch.randn(1, 2, 8))


def test_layers(repository):
    """Blocks of gpt-oss, Mixtral and Qwen3-MoE, as kernelize changes them and as they are."""
    in_a_kernel(
        repository,
        """
import copy
from kernels import LocalLayerRepository, Mode, kernelize, register_kernel_mapping
from kernels import replace_kernel_forward_from_hub as maps
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

maps(GptOssMLP, "MegaBlocksMoeMLP")  # transformers does this beside the releases of kernels that it knows
maps(MixtralSparseMoeBlock, "FusedMoEBlock")
maps(Qwen3MoeSparseMoeBlock, "FusedMoEBlock")
names = "MegaBlocksMoeMLP", "FusedMoEBlock"
variant = Path(kernel.__file__).parent
layers = {name: LocalLayerRepository(variant, layer_name=name) for name in names}
register_kernel_mapping({name: {"cpu": layer} for name, layer in layers.items()}, inherit_mapping=False)
sizes = dict(hidden_size=32, intermediate_size=48, num_experts_per_tok=2)
qwen3 = dict(num_experts=4, moe_intermediate_size=48, norm_topk_prob=True)
cases = (
    (GptOssMLP, GptOssConfig(num_local_experts=4, **sizes)),
    (MixtralSparseMoeBlock, MixtralConfig(num_local_experts=4, **sizes)),
    (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig(**sizes, **qwen3)),
)
for cls, config in cases:
    config._experts_implementation = "eager"
    block = cls(config)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.2)
    mode = Mode.TRAINING | Mode.TORCH_COMPILE
    ours = kernelize(copy.deepcopy(block), mode=mode, device="cpu", use_fallback=False)
    assert type(ours) is cls and ours.forward.__func__.__module__ == kernel.layers.__name__
    x = torch.randn(2, 3, 32)
    results = []
    for module in (block, ours, torch.compile(ours, backend="eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        first = out[0] if isinstance(out, tuple) else out
        grads = torch.autograd.grad(first.square().sum(), [leaf, *(module.parameters())])
        results.append((*(out if isinstance(out, tuple) else [out]), *grads))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
""",
        "transformers",
    )

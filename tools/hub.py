"""Writes this checkout as a repository of Hugging Face's kernels hub.

    python tools/hub.py OUT [--library _ops.so] [--repo OWNER/NAME] [--kernel-version N]

OUT/build has one folder for each variant that the library serves: torch-stable-abi210-cpu-x86_64-linux, and
with GPU kernels one such as torch-stable-abi210-cu130-x86_64-linux. `kernels.get_local_kernel(OUT)` loads it,
and `kernels.get_kernel(REPO, version=N)` once OUT is the branch vN of REPO, a repository of type "kernel".
Layers for `kernels.kernelize` are in tools/hub_layers.py.

Without --library one is built whose operators have a namespace of their own, so that it and an installed
fused_moe can be in one process: beside the objects of `make build` only the two files that name it are
compiled. A library that is given keeps its namespace. The plugins of vLLM, SGLang, torchtitan and axolotl are
left out: those projects find an installed package.
"""

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fused_moe"
PLUGINS = ("axolotl.py", "sglang", "torchtitan", "vllm")
NAME = "fused-moe"  # of lower-case letters, digits and dashes
LICENSE = "BSD-3-Clause"
OLDEST_KERNELS = "0.17.0"  # the oldest that was tried
SYSTEM = f"{platform.machine()}-{platform.system().lower()}"
ARCHS = {"sm_80": "8.0", "compute_80": "8.0+PTX", "sm_90a": "9.0a"}  # setup.py's targets, by the hub's names

# In another process: a library cannot be unloaded. Says which namespace it brings, and how it was built.
LOOK = """
import json, sys, torch
before = set(torch._C._dispatch_get_all_op_names())
torch.ops.load_library(sys.argv[1])
(found,) = {name.split("::")[0] for name in set(torch._C._dispatch_get_all_op_names()) - before}
print(json.dumps([found, json.loads(getattr(torch.ops, found).facts())["build"]]))
"""

BUILD_TOML = """# Written by tools/hub.py. fused_moe's setup.py compiled what is in build/.
[general]
edition = 5
name = "{}"
version = {}
license = "{}"
backends = {}

[general.hub]
repo-id = "{}"

[torch]
stable-abi = "{}"
src = []
"""

CARD = """---
library_name: kernels
license: bsd-3-clause
tags:
- kernel
---

# fused_moe

Mixture-of-Experts layers for PyTorch as a few fused kernels, forward and backward: {url}

```python
from kernels import get_kernel

fused_moe = get_kernel("{repo}", version={version}, trust_remote_code=["{repo}"])
scores, ids = fused_moe.route(logits, top_k=8)
out = fused_moe.fused_experts(x, w1, w2, w3, scores, ids)
```

Layers for `kernelize`: `MegaBlocksMoeMLP` computes transformers' gpt-oss blocks, `FusedMoEBlock` those of
Mixtral, Qwen3-MoE and other models with a `gate` and `experts`. Both need transformers 5.7 or newer.
"""


def build_library(version: str) -> Path:
    """A library whose operators have a namespace of their own, from the objects of `make build`."""
    folder = ROOT / "build" / "hub"
    namespace = "fused_moe_hub_" + version.replace(".", "_")
    environment = os.environ | {"FUSED_MOE_NAMESPACE": namespace, "FUSED_MOE_MANYLINUX": "1"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder / "fused_moe" / "_ops.so"


def look_at(library: Path) -> tuple[str, dict[str, str]]:
    """The namespace of a library's operators, and the facts of its build."""
    run = subprocess.run([sys.executable, "-c", LOOK, library], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"tools/hub.py: {library} cannot be loaded:\n{run.stderr}")
    namespace, build = json.loads(run.stdout)
    return namespace, build


def backends_of(build: dict[str, str]) -> dict[str, dict]:
    """{part of a variant's name: its backend in metadata.json}. Every library has the CPU's kernels."""
    backends = {"cpu": {"type": "cpu"}}
    targets = [] if build["gpu_targets"] == "none" else build["gpu_targets"].split()
    if targets:
        major, minor = re.search(r"release (\d+)\.(\d+)", build["nvcc"]).groups()
        backends[f"cu{major}{minor}"] = {"type": "cuda", "archs": [ARCHS[target] for target in targets]}
    return backends


def copy_package(folder: Path, namespace: str) -> None:
    """The Python files, without plugins. The loader names the package, so no file may import fused_moe."""
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] in PLUGINS:
            continue
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            if any(module.split(".")[0] == "fused_moe" for module in modules):
                raise SystemExit(f"tools/hub.py: {path}:{node.lineno}: expected a relative import")
        if str(inside) == "namespace.py":
            text = text.replace('"fused_moe"', f'"{namespace}"')
        if str(inside) == "__init__.py":
            text += "\nfrom . import layers as layers  # noqa: E402 - for kernels.kernelize\n"
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        (folder / inside).write_text(text)
    shutil.copy(ROOT / "tools" / "hub_layers.py", folder / "layers.py")


def digest(folder: Path) -> str:
    """Seven hexadecimal digits for what a variant holds: each has its own name among Python's modules."""
    sha = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sha.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:7]


def write(out: Path, library: Path, repo: str, kernel_version: int) -> list[Path]:
    """Writes the repository; returns the folders of its variants."""
    namespace, build = look_at(library)
    backends = backends_of(build)
    project = (ROOT / "pyproject.toml").read_text()
    url = re.search(r'^Homepage = "(.*)"', project, re.MULTILINE)[1]
    variants = []
    if (out / "build").exists():
        shutil.rmtree(out / "build")
    for name, backend in backends.items():
        abi = build["abi_target"].replace(".", "")
        folder = out / "build" / f"torch-stable-abi{abi}-{name}-{SYSTEM}"
        copy_package(folder, namespace)
        shutil.copy(library, folder / "_ops.so")
        metadata = {
            "id": f"_fused_moe_{backend['type']}_{digest(folder)}",
            "name": NAME,
            "version": kernel_version,
            "kernels-minver": OLDEST_KERNELS,
            "license": LICENSE,
            "upstream": url,
            "python-depends": [],
            "backend": backend,
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        variants.append(folder)
    kinds = [backend["type"] for backend in backends.values()]
    values = (NAME, kernel_version, LICENSE, json.dumps(kinds), repo, build["abi_target"])
    (out / "build.toml").write_text(BUILD_TOML.format(*values))
    (out / "README.md").write_text(CARD.format(url=url, repo=repo, version=kernel_version))
    shutil.copy(ROOT / "LICENSE", out)
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--library", type=Path, help="a built _ops.so; by default one is built")
    parser.add_argument("--repo", default="fused-moe/fused-moe", help="the repository on the hub")
    parser.add_argument(
        "--kernel-version", type=int, default=1, help="the hub's version, which is one number"
    )
    args = parser.parse_args()
    if args.out.resolve() == ROOT:
        raise SystemExit("tools/hub.py: expected OUT to be another folder than the checkout")
    if (args.out / "build").exists() and not (args.out / "build.toml").exists():
        raise SystemExit(f"tools/hub.py: expected {args.out}/build of an earlier run, found another")
    version = re.search(r'^__version__ = "(.*)"', (PACKAGE / "version.py").read_text(), re.MULTILINE)[1]
    library = args.library or build_library(version)
    for variant in write(args.out, library.resolve(), args.repo, args.kernel_version):
        print(variant)


if __name__ == "__main__":
    main()

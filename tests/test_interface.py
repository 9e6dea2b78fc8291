"""What users lean on: operator schemas, public signatures, and checkpoints that load without running code.

interface.txt has the schemas, the signatures and the names in a state_dict. A change of it is a change for
users: CHANGELOG.md names it. Renewed from the repository's root by

    PYTHONPATH=. python tests/test_interface.py >tests/interface.txt
"""

import inspect
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused_moe
from fused_moe import distributed, tensor_parallel

PINNED = Path(__file__).with_name("interface.txt")
SCRIPT = Path(__file__).parents[1] / "examples" / "train_lm.py"
# Every keyword of FusedMoE, with a value that is not its default.
OPTIONS = {
    "score_func": "sigmoid",
    "route_norm": True,
    "route_scale": 2.5,
    "route_norm_eps": 1e-12,
    "num_expert_groups": 4,
    "num_limited_groups": 2,
    "group_score": "max",
    "expert_scale": True,
    "num_shared_experts": 2,
    "shared_expert_gate": True,
    "latent_dim": 20,
    "latent_norm": True,
    "load_balance_coeff": 1e-3,
    "activation": "situ",
    "alpha": 4.0,
    "limit": 10.0,
    "gated": False,
    "bias": True,
    "gate_bias": True,
    "router_dtype": torch.float32,
    "fp8": True,
    "device": "cpu",
    "dtype": torch.bfloat16,
}
NEEDS = {
    "num_expert_groups": "num_limited_groups",
    "num_limited_groups": "num_expert_groups",
    "shared_expert_gate": "num_shared_experts",
    "latent_norm": "latent_dim",
}
SIZES = {"D": 24, "L": 20, "F": 16, "E": 8, "1": 1}


def layer(**options):
    sizes = (128, 768) if options.get("fp8") else (SIZES["D"], SIZES["F"])
    return fused_moe.FusedMoE(*sizes, SIZES["E"], 2, **options)


# --- schemas and signatures ---------------------------------------------------------------------------


def signature(function) -> str:
    """Names, kinds and defaults. Annotations, which no call depends on, print differently in each Python."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))


def public_methods(cls):
    """Name -> function, classmethod or property of a class, also of those of our classes that it inherits."""
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("fused_moe")]
    members = {name: member for base in ours for name, member in vars(base).items() if name[0] != "_"}
    return {
        name: getattr(cls, name) if isinstance(member, classmethod) else member
        for name, member in sorted(members.items())
        if inspect.isfunction(member) or isinstance(member, classmethod | property)
    }


def describe(name, value):
    """The lines of a public name."""
    if inspect.ismodule(value):
        for inner in sorted(value.__all__):
            yield from describe(f"{name}.{inner}", getattr(value, inner))
    elif inspect.isclass(value):
        fields = getattr(value, "_fields", None)
        yield f"{name}({', '.join(fields)})" if fields else f"{name}{signature(value)}"
        for method, member in public_methods(value).items():
            yield f"{name}.{method}{'' if isinstance(member, property) else signature(member)}"
    else:
        yield f"{name}{signature(value)}"


def state_dict_names():
    letters = {size: letter for letter, size in SIZES.items()}
    options = ("shared_expert_gate", "bias", "gate_bias", "latent_dim", "latent_norm")
    most = layer(num_shared_experts=1, load_balance_coeff=1, **{name: OPTIONS[name] for name in options})
    for name, value in most.state_dict().items():
        yield f"{name} ({', '.join(letters[size] for size in value.shape)})"


def interface() -> str:
    schemas = [str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("fused_moe::")]
    names = [line for n in fused_moe.__all__ for line in describe(f"fused_moe.{n}", getattr(fused_moe, n))]
    names += describe("fused_moe.distributed.ExpertParallel", distributed.ExpertParallel)
    split = tensor_parallel.ExpertTensorParallel
    names += describe("fused_moe.tensor_parallel.ExpertTensorParallel", split)
    parts = {
        "operators": sorted(schemas),
        "public names": names,
        "state_dict of FusedMoE with all that is optional": state_dict_names(),
    }
    return "\n".join("\n".join([f"# {title}", *lines, ""]) for title, lines in parts.items())


@pytest.mark.quick
def test_the_interface_is_the_pinned_one(cpu):
    assert interface().splitlines() == PINNED.read_text().splitlines(), __doc__


# --- checkpoints --------------------------------------------------------------------------------------


def reload(state):
    """Loads as from an unknown file: torch.load runs none of its code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.quick
@pytest.mark.parametrize("option", [None, *OPTIONS])
def test_a_state_dict_loads_with_weights_only(cpu, option):
    """State of the layer and its optimizer, after a step, into a new layer that computes the same bits."""
    options = {name: OPTIONS[name] for name in (option, NEEDS.get(option)) if name}
    first, second = layer(**options), layer(**options)
    x = torch.randn(5, first.dim, dtype=options.get("dtype"))
    optimizer = torch.optim.AdamW(first.parameters())
    first(x).square().sum().backward()
    optimizer.step()
    first.update_expert_bias()
    state = reload({"model": first.state_dict(), "optimizer": optimizer.state_dict()})
    second.load_state_dict(state["model"])
    torch.optim.AdamW(second.parameters()).load_state_dict(state["optimizer"])
    assert torch.equal(first(x), second(x))


def test_every_option_is_loaded():
    parameters = inspect.signature(fused_moe.FusedMoE).parameters.values()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(OPTIONS)


def test_main_grads_are_no_part_of_a_state_dict(cpu):
    moe = layer()
    for weight in moe.experts.weights:
        weight.main_grad = torch.zeros(weight.shape)
    state = reload(moe.state_dict())
    assert set(state) == set(layer().state_dict())
    assert not any(hasattr(value, "main_grad") for value in state.values())


def test_the_examples_checkpoint_loads_with_weights_only(cpu, tmp_path):
    for name in ("matplotlib", "tqdm"):
        pytest.importorskip(name)
    if not SCRIPT.exists():
        pytest.skip("not in a checkout")
    sizes = (
        "--layers 1 --dim 32 --hidden-dim 16 --num-experts 4 --top-k 2 --seq-len 32 --batch-size 2 --steps 2"
    )
    command = [sys.executable, SCRIPT, *sizes.split(), "--device", "cpu", "--out", tmp_path]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert set(state) == {"config", "fused"}
    assert set(state["fused"]) == {"model", "optimizer", "log"}
    assert state["fused"]["log"][-1]["step"] == 2


if __name__ == "__main__":
    print(interface(), end="")

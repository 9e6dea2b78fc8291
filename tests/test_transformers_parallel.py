"""transformers' expert parallelism in two processes: its own exchange and ep_implementation="fused_moe".

Two processes start once and do all that is checked here: logits, loss and gradients of a model, single layers
on hostile routings, and what is refused.
"""

import inspect
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import product

import pytest
import torch
import torch.distributed as dist
from cases import F64, Calls, assert_near
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from test_peft import lora_config  # noqa: E402
from test_transformers import NUM_EXPERTS, tiny_config, tiny_model, token_ids  # noqa: E402
from test_transformers_quantized import write_checkpoint  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402

import fused_moe.transformers  # noqa: E402

if "ep_implementation" not in inspect.signature(DistributedConfig).parameters:
    pytest.skip("this transformers has other settings for expert parallelism", allow_module_level=True)

BATCHES = {"shared batch": {"tp_size": 2, "ep_size": 2}, "own batches": {"fsdp_size": 2, "ep_size": 2}}
EXCHANGES = ("auto", "fused_moe")
K = 3  # experts per token
GREEDY = {"max_new_tokens": 2, "do_sample": False}


# --- in each process --------------------------------------------------------------------------------------


def model_on_rank(folder, batches: str, exchange: str):
    return AutoModelForCausalLM.from_pretrained(
        folder,
        experts_implementation="fused_moe",
        attn_implementation="eager",
        distributed_config=DistributedConfig(**BATCHES[batches], ep_implementation=exchange),
    )


def train(rank: int, folder, batches: str, exchange: str) -> dict:
    """Logits without gradients, loss and gradients, generated ids; the experts and rows of each call of
    kernels."""
    model, ids = model_on_rank(folder, batches, exchange), torch.load(folder / "ids.pt")
    is_own = batches == "own batches"
    if is_own:
        ids = ids.chunk(2)[rank]
    generated = model.generate(ids, synced_gpus=is_own, **GREEDY)
    with Calls() as calls:
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    found = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
    up = [args for args, _ in calls.of("experts_up")]
    experts = [args[1][0].size(0) for args, _ in calls.of("experts")] + [args[1].size(0) for args in up]
    tensors = {"logits": logits, "loss": loss.detach(), "generated": generated, **found}
    return {"tensors": tensors, "experts": experts, "rows": [args[0].size(0) for args in up]}


ROUTINGS = ("random", "rank 1 alone", "no experts", "none")


def layer(rank: int, tokens: tuple[int, int], routing: str, shares: bool) -> None:
    """A layer's experts on rows of both ranks, or on a batch that they share, against all experts here."""
    from fused_moe.transformers.parallel import FusedEP

    torch.manual_seed(0)  # the same on both ranks
    config = tiny_config("mixtral")
    config._experts_implementation = "fused_moe"
    experts = MixtralExperts(config).double()
    weights = {name: torch.randn_like(p) / 4 for name, p in experts.named_parameters()}
    x, dout = torch.randn(2, sum(tokens), config.hidden_size, dtype=F64)
    scores, ids = torch.rand(len(x), K, dtype=F64), torch.rand(len(x), NUM_EXPERTS).topk(K).indices
    half = NUM_EXPERTS // 2
    if routing == "rank 1 alone":
        ids = half + ids % half
    elif routing == "no experts":
        ids[::2, 0], ids[1::3] = -1, NUM_EXPERTS
    elif routing == "none":
        ids[:] = -1
    leaves = [t.clone().requires_grad_() for t in (x, *weights.values(), scores)]
    x_all, w1, w2, scores_all = leaves
    call = (w1, w2, None, scores_all, ids)
    expected = fused_moe.reference.fused_experts(x_all, *call, layout="halves")
    dx, dw1, dw2, dscores = torch.autograd.grad(expected, leaves, dout)

    own, mine = slice(rank * half, (rank + 1) * half), slice(0, len(x))
    if not shares:
        mine = slice(0, tokens[0]) if rank == 0 else slice(tokens[0], len(x))
    experts.num_experts = half
    for name, weight in weights.items():
        setattr(experts, name, torch.nn.Parameter(weight[own].clone()))
    mesh = init_device_mesh("cpu", (2,))
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    exchange = FusedEP(experts, mesh, mesh if shares else alone)
    leaves = [x[mine].clone().requires_grad_(), *experts.parameters(), scores[mine].clone().requires_grad_()]
    with Calls() as calls:
        out = exchange(leaves[0], ids[mine], leaves[-1])
    found = torch.autograd.grad(out, leaves, dout[mine])
    ((args, (h, *_)),) = calls.of("experts_up")
    is_here = (ids >= own.start) & (ids < own.stop)
    assert args[0].size(0) == is_here.any(1).sum()  # each token once
    assert h.size(0) == is_here.sum()  # and memory for this rank's slots alone
    again = checkpoint(exchange, leaves[0], ids[mine], leaves[-1], use_reentrant=False)  # exchanged again
    for value, same in zip(torch.autograd.grad(again, leaves, dout[mine]), found, strict=True):
        assert torch.equal(value, same)
    with torch.inference_mode():
        value = exchange(leaves[0], ids[mine].int(), leaves[-1])
    assert_near(value, expected[mine].detach(), slack=64)
    if shares:  # each rank has the whole, and its weights' gradients from both parts
        assert exchange.shares_batch
    assert_near(out.detach(), expected[mine].detach(), slack=64)
    for value, truth in zip(found, (dx[mine], dw1[own], dw2[own], dscores[mine]), strict=True):
        assert_near(value, truth, slack=64)


class OtherExperts(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights)


class PlainExperts(torch.nn.Module):
    """As Step3p7Experts, which has transformers' plan for expert parallelism, but not its decorator."""

    num_experts = NUM_EXPERTS


def refused(rank: int, folder) -> None:
    """Experts that others compute, and adapters of experts: an error on both ranks."""
    from fused_moe.transformers.parallel import FusedEP

    config, quick = tiny_config("mixtral"), tiny_config("mixtral", hidden_act="quick_gelu")
    config._experts_implementation = quick._experts_implementation = "fused_moe"
    theirs = tiny_config("mixtral")
    theirs._experts_implementation = "grouped_mm"
    mesh = init_device_mesh("cpu", (2,))
    for experts, found in (
        (MixtralExperts(theirs), "experts_implementation='grouped_mm'"),
        (MixtralExperts(quick), "QuickGELUActivation"),
        (OtherExperts(config), "OtherExperts, with a forward of its own"),
        (PlainExperts(), "PlainExperts, with a forward of its own"),
    ):
        with pytest.raises(ValueError, match=f"fused_moe computes, found .*{found}"):
            FusedEP(experts, mesh, mesh)
    for exchange in EXCHANGES:
        model = peft.get_peft_model(model_on_rank(folder, "own batches", exchange), lora_config())
        with pytest.raises(ValueError, match="no adapters of experts under expert parallelism"):
            model(input_ids=torch.ones(1, 4, dtype=torch.int64))


def join(rank: int, folder) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )


def run_rank(rank: int, folder) -> None:
    join(rank, folder)
    fused_moe.transformers.register()
    found = {run: train(rank, folder, *run) for run in product(BATCHES, EXCHANGES)}
    torch.save(found, folder / f"{rank}.pt")
    for tokens, routing in product(((5, 7), (0, 6)), ROUTINGS):
        layer(rank, tokens, routing, shares=False)
    for tokens in (7, 1):  # of one token the second rank has no part
        layer(rank, (tokens, 0), "random", shares=True)
    refused(rank, folder)
    dist.destroy_process_group()


# format: (width of experts whose scales two ranks cannot split, one whose scales they can)
QUANTISED = {"fp8_block": (128, 256), "int4": (96, 128), "int4, zero points": (96, 128)}


def run_quantised(rank: int, folder) -> None:
    """FSDP2 takes quantised experts of any width. Tensor parallelism splits scales, or both ranks raise."""
    join(rank, folder)
    fused_moe.transformers.register(compute="codes")
    for name, settings in product(torch.load(folder / "names.pt"), ({"fsdp_size": 2}, {"tp_size": 2})):
        kind, width = name
        path = folder / f"{kind} {width}"
        load = partial(
            AutoModelForCausalLM.from_pretrained,
            path,
            experts_implementation="fused_moe",
            attn_implementation="eager",
            dtype=torch.float32,
            distributed_config=DistributedConfig(**settings),
        )
        if "tp_size" in settings and width == QUANTISED[kind][0]:
            with pytest.raises(
                ValueError, match="to have scales that tp_size=2 can split, .*; use ep_size=2 or"
            ):
                load()
            continue
        model, ids, expected = load(), torch.load(path / "ids.pt"), torch.load(path / "logits.pt")
        own = slice(None) if "tp_size" in settings else slice(rank, None, 2)
        assert_near(model(ids[own]).logits.detach(), expected[own], slack=64)
    dist.destroy_process_group()


# --- what they found --------------------------------------------------------------------------------------


def test_expert_parallelism(cpu, tmp_path, monkeypatch):
    """Two processes with half of each layer's experts compute logits, loss and gradients of one with all.

    transformers sends tokens to their experts while it trains: a row per slot, or by our exchange each token
    once per rank. Without gradients, and if both have the same batch, each computes its experts for all of
    it, and marks the others' ids.
    """
    model, ids = tiny_model("qwen3_moe", "cpu"), token_ids("cpu")
    model.save_pretrained(tmp_path)
    torch.save(ids, tmp_path / "ids.pt")
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    generated = model.generate(ids, **GREEDY)
    expected = {"logits": out.logits, "loss": out.loss}
    expected |= {name: p.grad for name, p in model.named_parameters()}
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    torch.multiprocessing.spawn(run_rank, (tmp_path,), nprocs=2)
    runs = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for (batches, exchange), first in runs[0].items():
        second, found = runs[1][batches, exchange], first["tensors"]
        assert first["experts"] == second["experts"] == [NUM_EXPERTS // 2] * 4  # in two layers, twice
        if exchange == "auto":
            rows = [a + b for a, b in zip(first["rows"], second["rows"], strict=True)]
            assert rows == [ids.numel() * K] * 2
        else:
            assert all(n <= ids.numel() for n in (*first["rows"], *second["rows"]))
        own_tokens = found.pop("generated")
        if batches == "own batches":
            own_tokens = torch.cat([own_tokens, second["tensors"]["generated"]])
            found["logits"] = torch.cat([found["logits"], second["tensors"]["logits"]])
            found["loss"] = (found["loss"] + second["tensors"]["loss"]) / 2
        assert torch.equal(own_tokens, generated)
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert_near(found[name], value.detach(), slack=64)


def test_quantised_experts(cpu, tmp_path, monkeypatch):
    """They are frozen, since FSDP2 takes no FP8 parameters that require gradients. If scales cannot be split,
    both ranks raise: otherwise one would wait for the other."""
    fused_moe.transformers.register(compute="codes")
    kinds = [kind for kind in QUANTISED if kind == "fp8_block" or find_spec("compressed_tensors")]
    names = [(kind, width) for kind in kinds for width in QUANTISED[kind]]
    for kind, width in names:
        path, ids = tmp_path / f"{kind} {width}", token_ids("cpu")
        model = write_checkpoint(kind, path, moe_intermediate_size=width)
        torch.save(ids, path / "ids.pt")
        torch.save(model(ids).logits.detach(), path / "logits.pt")
    torch.save(names, tmp_path / "names.pt")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    torch.multiprocessing.spawn(run_quantised, (tmp_path,), nprocs=2)

"""A published checkpoint in transformers' experts and in ours: the logits of one text, and how they differ.

    .venv/bin/python examples/compare_checkpoint.py Qwen3-30B-A3B
    .venv/bin/python examples/compare_checkpoint.py FOLDER --device cuda --dtype bfloat16 --prompt "def main("

FOLDER is on this machine, with safetensors and a tokenizer. Three models compute the text:

    eager         transformers' own experts, one after the other
    fused_moe     the same model with experts_implementation="fused_moe"
    FusedMoE      every MoE block replaced by a FusedMoE that fused_moe.checkpoint.load has filled

A line per pair has the largest and the mean difference of logits, the mean KL divergence in nats, and how
often both put the same token first. 16-bit models differ by rounding: compare with the line of a float32 run.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import fused_moe.transformers
from fused_moe import FusedMoE, checkpoint

PROMPT = (
    "The quick brown fox jumps over the lazy dog. Mixture-of-Experts layers choose a few experts for every"
)


class Block(nn.Module):
    """A FusedMoE in place of a model's MoE block, of which some also return the router's scores."""

    def __init__(self, moe: FusedMoE, returns_scores: bool):
        super().__init__()
        self.moe, self.returns_scores = moe, returns_scores

    def forward(self, hidden_states, *args, **kwargs):
        out = self.moe(hidden_states)
        return (out, None) if self.returns_scores else out


def name_of(model: nn.Module, block: checkpoint.Block) -> str:
    """A layer's MoE block in a model of transformers."""
    names = dict(model.named_modules())
    found = [prefix[:-1] for prefix in block.prefixes if hasattr(names.get(prefix[:-1]), "experts")]
    if not found:
        raise ValueError(f"expected one of {', '.join(block.prefixes)} with experts in the model, found none")
    return found[0]


def replace_blocks(model: nn.Module, folder: str | Path, dtype: torch.dtype) -> None:
    """Puts FusedMoE layers, with the folder's weights, in the places of a model's MoE blocks."""
    device = next(model.parameters()).device
    layers = {}
    for block in checkpoint.blocks(folder):
        moe = FusedMoE.from_hf(folder, block.layer, device="meta", dtype=dtype)
        layers[block.layer] = moe
        model.set_submodule(name_of(model, block), Block(moe, model.config.model_type == "gpt_oss"))
    checkpoint.load(layers, folder)
    model.to(device)


def logits_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids.to(model.device)).logits.float().cpu()


def difference(expected: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
    diff = (found - expected).abs()
    log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
    return {
        "max": diff.max().item(),
        "mean": diff.mean().item(),
        "KL": (log_p.exp() * (log_p - log_q)).sum(-1).mean().item(),
        "top-1": (expected.argmax(-1) == found.argmax(-1)).float().mean().item(),
    }


def compare(folder: str | Path, ids: torch.Tensor, dtype: torch.dtype, device: str) -> dict[str, dict]:
    """{pair: its differences}"""
    fused_moe.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    model.to(device).eval()
    eager = logits_of(model, ids)
    model.set_experts_implementation("fused_moe")
    ours = logits_of(model, ids)
    replace_blocks(model, folder, dtype)
    layers = logits_of(model, ids)
    return {
        "eager, fused_moe": difference(eager, ours),
        "eager, FusedMoE": difference(eager, layers),
        "fused_moe, FusedMoE": difference(ours, layers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="of a checkpoint, on this machine")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--random", type=int, metavar="N", help="N random tokens in place of a text")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.random is None:
        ids = AutoTokenizer.from_pretrained(args.folder)(args.prompt, return_tensors="pt").input_ids
    else:
        vocabulary = checkpoint.open_folder(args.folder)["model.embed_tokens.weight"].size(0)
        ids = torch.randint(vocabulary, (1, args.random), generator=torch.Generator().manual_seed(0))
    found = compare(args.folder, ids, getattr(torch, args.dtype), args.device)
    print(f"{'logits of ' + str(ids.numel()) + ' tokens':24}{'max':>10}{'mean':>10}{'KL':>10}{'top-1':>10}")
    for pair, row in found.items():
        print(
            f"{pair:24}" + "".join(f"{row[x]:10.2e}" for x in ("max", "mean", "KL")) + f"{row['top-1']:10.2%}"
        )


if __name__ == "__main__":
    main()

"""Trains a small dense language model, makes a Mixture of Experts of it, and trains both on.

    .venv/bin/python examples/upcycle.py                    half a minute on two CPU cores
    .venv/bin/python examples/upcycle.py --granularity 2    experts of half the width, twice as many per byte
    .venv/bin/python examples/upcycle.py --noise 0.05       experts that start apart

Model and text are those of train_lm.py, with a dense MLP in each block. fused_moe.upcycle copies it into
every expert, so the new model starts with the dense one's loss. Then each trains on the same bytes.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
import train_lm
from torch import nn
from train_lm import positive

import fused_moe


class MLP(nn.Module):
    """The dense MLP of a block, with transformers' names."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def dense_model(args):
    model = train_lm.LanguageModel(args, "fused")
    for block in model.blocks:
        block.moe = MLP(args.dim, args.hidden_dim)
    return model


def upcycled(model, args):
    """A copy of the model with experts in place of each MLP, all of whose parameters train."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.moe = fused_moe.upcycle(
            block.moe,
            args.num_experts * args.granularity,
            args.top_k * args.granularity,
            granularity=args.granularity,
            noise=args.noise,
            load_balance_coeff=1e-3,
        )
    return model


def train(model, text, steps, args):
    """Steps first to last of one course: the same bytes for every model."""
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    if isinstance(model.blocks[0].moe, fused_moe.FusedMoE):
        fused_moe.balance(model, optimizer)
    for step in steps:
        inputs, targets = train_lm.training_batch(text, step, args)
        train_lm.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def parse(argv):
    parser = argparse.ArgumentParser(
        description="Upcycles a small dense language model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=positive, default=100, help="of the dense model, and again of both")
    for name, default in (("dim", 64), ("hidden-dim", 128), ("layers", 2), ("num-experts", 8), ("top-k", 2)):
        add(f"--{name}", type=positive, default=default)
    for name, default in (("seq-len", 128), ("batch-size", 8), ("granularity", 1)):
        add(f"--{name}", type=positive, default=default)
    add("--noise", type=float, default=0.0, help="on each expert's weights, as a part of their deviation")
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    torch.manual_seed(args.seed)
    training, validation = train_lm.load_text(None, args.seq_len)
    model = dense_model(args)

    def report(what, model):
        bits = train_lm.bits_per_byte(model, validation, args)
        count = sum(p.numel() for p in model.parameters())
        print(f"{what:32} {bits:.4f} bits per byte, {count:9,} parameters", flush=True)
        return bits

    train(model, training, range(args.steps), args)
    found = [report(f"dense, {args.steps} steps", model)]
    experts = upcycled(model, args)
    found.append(report("upcycled", experts))
    for what, each in (("dense", model), ("upcycled", experts)):
        train(each, training, range(args.steps, 2 * args.steps), args)
        found.append(report(f"{what}, {args.steps} steps more", each))
    return found


if __name__ == "__main__":
    main()

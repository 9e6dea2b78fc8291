"""Reinforcement learning whose sampler and trainer have the same bits: GRPO on one GPU.

    .venv/bin/python examples/grpo.py               fused_moe's layer, and its linear for all other products
    .venv/bin/python examples/grpo.py --stock       the same model by cuBLAS and torch._grouped_mm
    .venv/bin/python examples/grpo.py --moe-only    fused_moe's layer beside cuBLAS: what it gives alone
    .venv/bin/python examples/grpo.py --tiny        small enough for a CPU; nothing is claimed about bits

The sampler decodes with a key-value cache. Sequences end after different numbers of bytes and others take
their places, so a step has from one to --at-once of them. The trainer computes the same bytes in one packed
pass. Log-probabilities by the same parameters differ as far as kernels choose by the number of tokens. With
equal bits the ratio of both policies is exactly 1. The task: answer in lower-case letters.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fused_moe

HEAD_DIM, PROMPT, VOCAB = 128, 8, 256
SIZES = {  # of the model and of a step: by default Qwen3-30B-A3B's widths; with --tiny
    "dim": (2048, 128), "heads": (32, 2), "hidden_dim": (768, 64), "num_experts": (128, 8), "top_k": (8, 2),
    "layers": (2, 2), "prompts": (10, 4), "group": (16, 16), "at_once": (128, 24), "new": (192, 12),
    "steps": (4, 30),
}  # fmt: skip


def attend(q, k, v, ends_q, ends_k, longest_q, longest_k):
    """Causal attention of packed sequences (tokens, heads, HEAD_DIM), whose last tokens are the queries. Both
    sides call it: a kernel that adds a sequence's keys in one order, whatever else is in the batch."""
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, ends_q, ends_k, longest_q, longest_k, window_size=(-1, 0))
    out = []
    for i in range(len(ends_q) - 1):
        qs = q[ends_q[i] : ends_q[i + 1]].transpose(0, 1)
        ks, vs = (t[ends_k[i] : ends_k[i + 1]].transpose(0, 1) for t in (k, v))
        mask = torch.ones(qs.size(1), ks.size(1), dtype=torch.bool).tril(ks.size(1) - qs.size(1))
        out.append(F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask).transpose(0, 1))
    return torch.cat(out)


class Linear(nn.Linear):
    def forward(self, x):
        return fused_moe.linear(x, self.weight)


class StockMoE(nn.Module):
    """The layer without us: cuBLAS for the router, torch._grouped_mm on sorted rows for the experts."""

    def __init__(self, dim, hidden_dim, num_experts, top_k, **factory):
        super().__init__()
        self.gate, self.top_k = nn.Linear(dim, num_experts, bias=False, **factory), top_k
        for name, rows, cols in (("w1", hidden_dim, dim), ("w2", dim, hidden_dim), ("w3", hidden_dim, dim)):
            w = torch.empty(num_experts, rows, cols, **factory).uniform_(-(cols**-0.5), cols**-0.5)
            self.register_parameter(name, nn.Parameter(w))

    def forward(self, x):
        scores, ids = self.gate(x).float().softmax(-1).topk(self.top_k)
        order = ids.flatten().argsort(stable=True)
        ends = torch.bincount(ids.flatten(), minlength=len(self.w1)).cumsum(0).int()
        rows = x[order // self.top_k]
        gate, up = (torch._grouped_mm(rows, w.mT, offs=ends) for w in (self.w1, self.w3))
        rows = torch._grouped_mm(F.silu(gate) * up, self.w2.mT, offs=ends)
        per_token = torch.empty_like(rows).index_copy(0, order, rows).view(*ids.shape, -1)
        return (per_token.float() * scores.unsqueeze(-1)).sum(1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, o, **factory):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(o.dim, **factory) for _ in range(2))
        width, linear = o.heads * HEAD_DIM, Linear if o.variant == "fused_moe" else nn.Linear
        self.qkv = linear(o.dim, 3 * width, bias=False, **factory)
        self.out = linear(width, o.dim, bias=False, **factory)
        moe = StockMoE if o.variant == "stock" else fused_moe.FusedMoE
        self.moe = moe(o.dim, o.hidden_dim, o.num_experts, o.top_k, **factory)

    def forward(self, x, turn, cache, batch):
        q, k, v = self.qkv(self.norms[0](x)).view(len(x), 3, -1, HEAD_DIM).unbind(1)
        q, k = rotated(q, turn), rotated(k, turn)
        if cache is not None:  # (slots, length, 2, heads, HEAD_DIM)
            cache[batch["slot"], batch["position"]] = torch.stack((k, v), 1)
            k, v = cache[batch["key_slot"], batch["key_position"]].unbind(1)
        x = x + self.out(attend(q, k.contiguous(), v.contiguous(), *batch["attention"]).flatten(1))
        return x + self.moe(self.norms[1](x))


def rotated(x, turn):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class Model(nn.Module):
    def __init__(self, o, **factory):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, o.dim, **factory)
        self.blocks = nn.ModuleList(Block(o, **factory) for _ in range(o.layers))
        self.norm = nn.RMSNorm(o.dim, **factory)
        linear = Linear if o.variant == "fused_moe" else nn.Linear
        self.head = linear(o.dim, VOCAB, bias=False, **factory)

    def forward(self, tokens, batch, caches=None):
        """Packed tokens (T,) -> log-probabilities (T, VOCAB) of what follows each, in float32."""
        frequencies = 1e4 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=tokens.device)
        angles = batch["position"].float()[:, None, None] * frequencies
        turn, x = torch.polar(torch.ones_like(angles), angles), self.embedding(tokens)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, turn, cache, batch)
        return self.head(self.norm(x)).float().log_softmax(-1)


def batch_of(slots, lengths, queries, device):
    """Indices of sequences in `slots` of these lengths, whose last `queries[i]` tokens are computed."""
    slots, starts = torch.tensor(slots), torch.tensor(lengths) - torch.tensor(queries)

    def spread(counts):  # where each sequence ends; the sequence of each token, and its number in it
        ends = torch.tensor([0, *counts]).cumsum(0)
        sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return ends.int().to(device), sequence, torch.arange(len(sequence)) - ends[sequence]

    (ends, sequence, number), (key_ends, of_key, key_position) = spread(queries), spread(lengths)
    indices = {"slot": slots[sequence], "position": starts[sequence] + number, "sequence": sequence}
    indices |= {"key_slot": slots[of_key], "key_position": key_position}
    attention = (ends, key_ends, max(queries), max(lengths))
    return {name: i.to(device) for name, i in indices.items()} | {"attention": attention}


@torch.no_grad()
def sample(model, prompts, lengths, noise, at_once):
    """Continues prompts (N, PROMPT) to `lengths` bytes; noise (N, new, VOCAB) is each sequence's own. Returns
    bytes and their log-probabilities, (N, longest), and how many sequences each step had."""
    device, count, longest, places = prompts.device, len(prompts), max(lengths), min(at_once, len(prompts))
    shape = (places, longest, 2, model.blocks[0].out.in_features // HEAD_DIM, HEAD_DIM)
    caches = [torch.zeros(shape, device=device, dtype=model.norm.weight.dtype) for _ in model.blocks]
    tokens, logps = F.pad(prompts, (0, longest - PROMPT)), torch.zeros(count, longest, device=device)
    waiting, free, running, sizes = list(range(count)), list(range(places)), {}, []
    while waiting or running:  # running: sequence -> (slot, length)
        joined = [waiting.pop(0) for _ in range(min(len(free), len(waiting)))]
        running |= {i: (free.pop(), PROMPT) for i in joined}
        slots, known = zip(*running.values(), strict=True)
        queries = [PROMPT if i in joined else 1 for i in running]  # prompts and single bytes in one batch
        batch = batch_of(slots, known, queries, device)
        ids, at = torch.tensor([[*running], known]).to(device)
        logp = model(tokens[ids[batch["sequence"]], batch["position"]], batch, caches)
        logp = logp[batch["attention"][0][1:] - 1]  # of each sequence's last byte
        chosen = (logp + noise[ids, at - PROMPT]).argmax(-1)  # with Gumbel noise that is a sample
        tokens[ids, at], logps[ids, at] = chosen, logp.gather(1, chosen[:, None])[:, 0]
        sizes.append(len(running))
        running = {i: (slot, length + 1) for i, (slot, length) in running.items()}
        free += [slot for i, (slot, length) in running.items() if length == lengths[i]]
        running = {i: place for i, place in running.items() if place[1] < lengths[i]}
    return tokens, logps, sizes


def rewards_of(tokens, is_new):
    """(N,): the share of a sequence's new bytes that are lower-case letters."""
    return ((tokens >= ord("a")) & (tokens <= ord("z")) & is_new).sum(1) / is_new.sum(1)


def loss_of(new, old, advantages):
    """GRPO's clipped objective (arXiv 2402.03300), of log-probabilities (tokens,) by both policies."""
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def run_step(o, model, masters, optimizer, generator):
    """Samples, rewards and trains once. Returns the figures."""
    count, sync = o.prompts * o.group, torch.cuda.synchronize if o.device == "cuda" else lambda: None
    prompts = torch.randint(VOCAB, (o.prompts, PROMPT), generator=generator).repeat_interleave(o.group, 0)
    lengths = torch.randint(PROMPT + (o.new + 7) // 8, PROMPT + o.new + 1, (count,), generator=generator)
    noise = torch.rand(count, o.new, VOCAB, generator=generator).clamp_min(1e-30).log().neg().log().neg()
    noise, ends = noise.to(o.device), lengths.to(o.device)[:, None]
    times = [sync() or time.perf_counter()]
    tokens, old, sizes = sample(model, prompts.to(o.device), lengths.tolist(), noise, o.at_once)
    times.append(sync() or time.perf_counter())
    position, known = torch.arange(tokens.size(1), device=o.device), (lengths - 1).tolist()
    is_new, has_next = (position >= PROMPT) & (position < ends), position[:-1] < ends - 1
    group = (reward := rewards_of(tokens, is_new)).view(o.prompts, o.group)
    advantage = (group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)
    logp = model(tokens[:, :-1][has_next], batch_of(range(count), known, known, o.device))
    new = logp.gather(1, tokens[:, 1:][has_next][:, None])[:, 0][is_new[:, 1:][has_next]]
    loss_of(new, old[is_new], advantage.flatten().repeat_interleave(is_new.sum(1))).backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad, p.grad = p.grad.float(), None
    optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), masters)
    times.append(sync() or time.perf_counter())
    d = new.detach().double() - old[is_new]  # in float32 the KL of small differences is rounding alone
    return {
        "reward": reward.mean().item(), "largest_difference": d.abs().max().item(), "tokens": d.numel(),
        "tokens_that_differ": int((d != 0).sum()), "kl": (d.expm1() - d).mean().item(),
        "sequences": [min(sizes), max(sizes)], "sampler_tokens_per_s": len(d) / (times[1] - times[0]),
        "trainer_tokens_per_s": sum(known) / (times[2] - times[1]),
    }  # fmt: skip


def main(argv=None):
    o = parse(argv)
    torch.manual_seed(0)
    generator, steps, on_gpu = torch.Generator().manual_seed(0), [], o.device == "cuda"
    model = Model(o, device=o.device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    masters = [p.detach().float().clone() for p in model.parameters()]  # bf16 would lose small updates
    optimizer = torch.optim.AdamW(masters, lr=o.lr)
    print(f"{o.variant}: {sum(map(torch.numel, masters)) / 1e6:.0f}M parameters, {o.device}")
    print("step, reward; largest difference, tokens that differ, KL; at once; tokens/s of sampler, trainer")
    for step in range(o.steps):
        steps.append(run_step(o, model, masters, optimizer, generator))
        reward, largest, tokens, differ, kl, (least, most), *rates = steps[-1].values()
        bits = f"{largest:.1e}, {differ} of {tokens}, {kl:.1e}; {least} to {most}; {{:,.0f}}, {{:,.0f}}"
        print(f"{step:4d}, {reward:.3f};", bits.format(*rates), flush=True)
    differ, same = sum(s["tokens_that_differ"] for s in steps), "the same bits in every token, KL exactly 0"
    print(f"{o.variant}: {f'sampler and trainer differ in {differ} tokens' if differ else same}")
    if o.json:
        about = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__}
        about |= {name: getattr(o, name) for name in ("variant", *SIZES)}
        before = json.loads(o.json.read_text()) if o.json.exists() else []
        o.json.write_text(json.dumps([*before, about | {"figures": steps}], indent=1) + "\n")


def parse(argv):
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.set_defaults(variant="fused_moe")
    for name in ("stock", "moe-only"):
        flags.add_argument(f"--{name}", dest="variant", action="store_const", const=name)
    for name, defaults in SIZES.items():
        flags.add_argument(f"--{name.replace('_', '-')}", type=int, help="default {}, {}".format(*defaults))
    flags.add_argument("--tiny", action="store_true", help="the second of two defaults")
    flags.add_argument("--lr", type=float, help="default 3e-4, 5e-3")
    flags.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags.add_argument("--json", type=Path, help="a file to which the figures are added")
    o = flags.parse_args(argv)
    for name, defaults in (SIZES | {"lr": (3e-4, 5e-3)}).items():
        setattr(o, name, defaults[o.tiny] if getattr(o, name) is None else getattr(o, name))
        if getattr(o, name) <= (above := int(name == "group")):  # advantages are relative to a group
            flags.error(f"expected {name} above {above}, found {getattr(o, name)}")
    return o


if __name__ == "__main__":
    main()

"""Trains small MoE models for minutes, under what a long run meets, and checks every step.

    python tests/trust/soak.py --minutes 8 --seed 0 --device cuda --record soak.json

Two models, bf16 and float32, train on two streams at once, with changing token counts and routings, some
steps with main_grads. Between them a captured step of a third model is replayed. PyTorch may take only a part
of the device's memory (--memory-fraction), so several soaks share a GPU; mostly hardly more than the steps
need, so its allocator has to free and retry. Checked are:
  finite      every loss
  same bits   sampled steps run again from the same parameters, optimizer state and inputs; every number
  graphs      a replay gives the bits of the same step, run eagerly
  memory      bytes asked of PyTorch's allocator and held after steps: always the same. What the driver has
              free says nothing here: others share the device; tests/cuda/test_device_memory.py looks at it
  out of memory   in forward and in backward it raises PyTorch's OutOfMemoryError, and the call gives the
              same bits as before once there is memory
  held SMs    a step ends, with the same bits, while another kernel holds 1, half, or almost all of the SMs
  few SMs     a step has the same bits in a green context of 8, 16 or 64 SMs
  at once     calls of eight threads, on one stream or 64, and beside replays of graphs, have the bits of each
              call alone

On the CPU it trains, runs steps again, and makes calls at once. A part is determined by its seed: another
part of a soak has another seed, and the records of all parts add up (record.py). Exits with 1 on a finding.
"""

import argparse
import gc
import math
import os
import random
import sys
import time
import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits on several streams

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))

from judging import forward_backward  # noqa: E402
from trust import concurrency, held_sms, record  # noqa: E402

from fused_moe import FusedMoE, fused_experts  # noqa: E402

DIM = 256
ROUTINGS = ("free", "random", "skewed", "one expert", "empty experts")
MIB = 1 << 20
FEW_CALLS = {
    "layers": (((8, 2, 64, 32), {"num_shared_experts": 1}, None), ((8, 2, 64, 32), {}, "int8")),
    "tokens": (1, 9),
}


class Model(nn.Module):
    """Layers of experts with residuals."""

    def __init__(self, num_layers: int, **settings):
        super().__init__()
        self.layers = nn.ModuleList(
            FusedMoE(DIM, load_balance_coeff=1e-3, **settings) for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(nn.functional.layer_norm(x, (DIM,)))
        return x

    def route_by(self, routing: str) -> None:
        """Sets the biases that choose experts; "free": balancing has moved them, and goes on."""
        for layer in self.layers:
            bias = layer.expert_bias
            if routing == "random":
                bias.zero_()
            elif routing == "skewed":
                bias.copy_(torch.linspace(0, -0.4, len(bias), device=bias.device))
            elif routing == "one expert":  # every token's first choice
                bias.zero_()[len(bias) // 2] = 10
            elif routing == "empty experts":
                bias.zero_()[1::2] = -10


@dataclass
class Batch:
    inputs: list[Tensor]  # of each micro-batch
    targets: list[Tensor]
    routing: str
    main_grads: bool


class Trainee:
    """A model, its optimizer, and the stream that it trains on."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int, capturable=False, **settings):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.dtype = dtype
        with self.current():
            self.draws = torch.Generator(device).manual_seed(seed)
            self.model = Model(device=device, dtype=dtype, **settings)
            self.weights = [w for layer in self.model.layers for w in layer.experts.weights if w is not None]
            self.main_grads = [torch.zeros_like(w, dtype=torch.float32) for w in self.weights]
            options = {"capturable": True} if capturable else {}
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **options)

    def current(self):
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def draw(self, tokens: int, routing="free", main_grads=False, micro_batches=1) -> Batch:
        shape, device = (tokens, DIM), self.draws.device
        inputs, targets = (
            [
                torch.randn(shape, generator=self.draws, device=device).to(self.dtype)
                for _ in range(micro_batches)
            ]
            for _ in range(2)
        )
        return Batch(inputs, targets, routing, main_grads)

    def step(self, batch: Batch, keep=False) -> dict[str, Tensor]:
        """One optimizer step; its loss, and with `keep` everything that it has computed."""
        self.model.route_by(batch.routing)
        if batch.main_grads:
            for weight, main_grad in zip(self.weights, self.main_grads, strict=True):
                weight.main_grad = main_grad
        kept, loss = {}, 0
        for i, (x, target) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
            out = self.model(x)
            part = (out - target).float().square().mean()
            part.backward()
            loss = loss + part.detach()
            if keep:
                kept[f"out {i}"] = out.detach()
        if batch.main_grads:
            for weight, main_grad in zip(self.weights, self.main_grads, strict=True):
                assert weight.grad is None
                weight.grad = main_grad.to(weight.dtype)
        if keep:
            kept |= {f"gradient of {n}": p.grad.clone() for n, p in self.model.named_parameters()}
        self.optimizer.step()
        for layer in self.model.layers:
            layer.update_expert_bias()
        self.forget()
        if keep:
            kept |= {f"state {i}": t for i, t in enumerate(self.state())}
        return {"loss": loss, **kept}

    def forget(self) -> None:
        """Gradients and token counts, also those of a step that was cut short."""
        self.optimizer.zero_grad(set_to_none=True)
        for layer in self.model.layers:
            layer.tokens_per_expert.zero_()
        for weight, main_grad in zip(self.weights, self.main_grads, strict=True):
            if hasattr(weight, "main_grad"):
                main_grad.zero_()
                del weight.main_grad

    def tensors(self) -> list[Tensor]:
        moments = [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        return [*self.model.parameters(), *self.model.buffers(), *moments]

    def state(self) -> list[Tensor]:
        return [t.detach().clone() for t in self.tensors()]

    @torch.no_grad()
    def restore(self, state: list[Tensor]) -> None:
        for tensor, saved in zip(self.tensors(), state, strict=True):
            tensor.copy_(saved)


class CapturedStep:
    """A training step recorded as a graph, on its own stream."""

    def __init__(self, device: torch.device, seed: int):
        settings = {"hidden_dim": 64, "num_experts": 8, "top_k": 2, "num_layers": 2, "num_shared_experts": 1}
        self.trainee = Trainee(device, torch.bfloat16, seed, capturable=True, **settings)
        with self.trainee.current():
            self.batch = self.trainee.draw(500)
            for _ in range(3):
                self.trainee.step(self.batch)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.trainee.stream):
            self.recorded = self.trainee.step(self.batch)

    def draw(self) -> None:
        """Other inputs."""
        new = self.trainee.draw(500)
        self.batch.inputs[0].copy_(new.inputs[0])
        self.batch.targets[0].copy_(new.targets[0])


class Soak:
    def __init__(self, args):
        self.args, self.device = args, torch.device(args.device)
        self.is_cuda = self.device.type == "cuda"
        self.choice = random.Random(args.seed)
        self.counts, self.findings = Counter(), []
        self.losses = []
        torch.manual_seed(args.seed)
        if self.is_cuda:
            torch.cuda.set_device(self.device.index or 0)
            self.allow()
        common = {"num_layers": 3, "num_shared_experts": 1}
        self.trainees = [
            Trainee(self.device, torch.bfloat16, args.seed, hidden_dim=128, num_experts=16, top_k=4,
                    score_func="sigmoid", route_norm=True, shared_expert_gate=True, bias=True, **common),
            Trainee(self.device, torch.float32, args.seed + 1, hidden_dim=72, num_experts=8, top_k=1,
                    activation="gelu", gated=False, **common),
        ]  # fmt: skip
        self.max_tokens = 4000 if self.is_cuda else 200
        self.calls = concurrency.Calls(self.device, **({} if self.is_cuda else FEW_CALLS))
        self.shares = {self.train: 60, self.run_again: 20, self.call_at_once: 1}
        if self.is_cuda:
            self.shares |= {
                self.replay_graph: 12,
                self.run_out_of_memory: 6,
                self.hold_sms: 1,
                self.use_few_sms: 2,
                self.tighten: 2,
            }
            try:
                held_sms.library()
            except held_sms.NotAvailable as reason:
                self.leave_out(self.hold_sms, reason)
                self.leave_out(self.use_few_sms, reason)

    # --- what is done, in random order ---------------------------------------------------------------------

    def train(self) -> None:
        """Steps of both models, queued on both streams without waiting."""
        for _ in range(self.choice.randint(1, 6)):
            for trainee in self.trainees:
                with self.survived_out_of_memory(trainee), trainee.current():
                    self.losses.append(trainee.step(self.draw(trainee))["loss"])
                    self.counts["steps"] += 1

    def run_again(self) -> None:
        """A step of one model, twice from the same state, beside steps of the other."""
        trainee, other = self.choice.sample(self.trainees, 2)
        runs = []
        with self.survived_out_of_memory(trainee), trainee.current():
            batch, state = self.draw(trainee), trainee.state()
            for _ in range(2):
                trainee.restore(state)
                runs.append(trainee.step(batch, keep=True))
                self.counts["steps"] += 1
                with self.survived_out_of_memory(other), other.current():
                    self.losses.append(other.step(self.draw(other))["loss"])
                    self.counts["steps"] += 1
            self.compare("a step", *runs)
            self.counts["replays compared"] += 1

    def replay_graph(self) -> None:
        """Replays beside the other models' steps, and one that is compared with the same step run eagerly."""
        captured, trainee = self.captured, self.captured.trainee
        for _ in range(self.choice.randint(1, 4)):
            with self.survived_out_of_memory(trainee), trainee.current():
                captured.draw()
                captured.graph.replay()
                self.losses.append(captured.recorded["loss"].clone())
                self.counts["graph replays"] += 1
            self.train()
        with self.survived_out_of_memory(trainee), trainee.current():
            state = trainee.state()
            captured.graph.replay()
            self.counts["graph replays"] += 1
            replayed = {"loss": captured.recorded["loss"].clone(), "state": trainee.state()}
            trainee.restore(state)
            eager = {"loss": trainee.step(captured.batch)["loss"], "state": trainee.state()}
            self.compare("a graph", flat(replayed), flat(eager))

    def run_out_of_memory(self) -> None:
        """The experts with memory, without, and with memory again: before forward, or before backward."""
        trainee = self.choice.choice(self.trainees)
        in_backward, room = self.choice.random() < 0.5, self.choice.randint(0, 64) * MIB
        self.allow()
        with trainee.current():
            inputs, dout, fixed = self.experts_call(trainee)
            expected = forward_backward(fused_experts, inputs, dout, **fixed)
            with self.survived_out_of_memory(trainee):
                leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t is not None}
                if not in_backward:
                    self.allow(room)
                out = fused_experts(**{**inputs, **leaves}, **fixed)
                if in_backward:
                    self.allow(room)
                torch.autograd.grad(out, list(leaves.values()), dout)
            out = leaves = None
            self.allow()
            found = forward_backward(fused_experts, inputs, dout, **fixed)
            self.compare("a call after one without memory", expected, found)
        self.tighten()

    def hold_sms(self) -> None:
        """A step, while a kernel holds some of the SMs."""
        trainee = self.choice.choice(self.trainees)
        num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        # PyTorch's bf16 GEMMs may be clusters of CTAs, which start on several SMs of one GPC or not at all
        most = num_sms // 2 if trainee.dtype == torch.bfloat16 else num_sms - 1
        held = self.choice.choice((1, num_sms // 2, most))
        self.allow()
        with trainee.current():
            batch, state, runs = self.draw(trainee, tokens=1000), trainee.state(), []

            def run() -> dict:
                trainee.restore(state)
                return trainee.step(batch, keep=True)

            for _ in range(3):  # the last of them finds all memory in PyTorch's cache
                runs = [*runs[-1:], run()]
            runs.pop()
            try:
                found, ended = held_sms.ends_while_held(run, held)
            except held_sms.NotAvailable as reason:
                self.leave_out(self.hold_sms, reason)
            else:
                self.counts["held-SM steps"] += 1
                if not ended:
                    self.find(f"a step did not end while {held} SMs were held")
                self.compare(f"a step with {held} SMs held", runs[0], found)
        self.tighten()

    def use_few_sms(self) -> None:
        """A step on the trainee's stream, and the same step in a green context."""
        trainee = self.choice.choice(self.trainees)
        try:
            stream, _ = held_sms.green_stream(self.choice.choice((8, 16, 64)))
        except held_sms.NotAvailable as reason:
            return self.leave_out(self.use_few_sms, reason)
        self.allow()
        with trainee.current():
            batch, state = self.draw(trainee, tokens=1000), trainee.state()
            expected = trainee.step(batch, keep=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            trainee.restore(state)
            found = trainee.step(batch, keep=True)
        torch.cuda.synchronize()
        self.counts["few-SM steps"] += 1
        self.compare(f"a step in {stream} of few SMs", expected, found)
        self.tighten()

    def call_at_once(self) -> None:
        """Calls of eight threads: on one stream or on separate ones, some beside replays of graphs."""
        if not self.is_cuda:
            streams, beside = [[None]] * 2, None
        else:
            self.allow()
            one, own = (
                [torch.cuda.Stream()],
                [torch.cuda.Stream(priority=p) for p in (0, -1) for _ in range(32)],
            )
            streams = self.choice.choice(([one] * 8, [own[i::8] for i in range(8)]))
            beside = self.choice.choice((None, self.replays))
        found = concurrency.at_once(self.calls, streams, 2 * concurrency.QUEUED, beside)
        self.counts["calls at once"] += 2 * concurrency.QUEUED * len(streams)
        for text in sorted(set(found)):
            self.find(f"of calls at once: {text}")
        if self.is_cuda:
            self.tighten()

    def leave_out(self, action, reason: Exception) -> None:
        print(f"{action.__name__}: not possible here, {reason}", flush=True)
        del self.shares[action]

    # --- inputs --------------------------------------------------------------------------------------------

    def draw(self, trainee: Trainee, tokens: int | None = None) -> Batch:
        sizes = (1, 7, 64, self.max_tokens, self.choice.randint(1, self.max_tokens))
        return trainee.draw(
            tokens or self.choice.choice(sizes),
            self.choice.choice(ROUTINGS),
            main_grads=self.choice.random() < 0.3,
            micro_batches=self.choice.randint(1, 2),
        )

    def experts_call(self, trainee: Trainee) -> tuple[dict, Tensor, dict]:
        """Inputs, the output's gradient and the ids of a call with results of 16 MiB and more."""
        layer, (x, dout) = trainee.model.layers[0], (trainee.draw(16000).inputs[0] for _ in range(2))
        experts = layer.experts
        with torch.no_grad():
            scores, ids, _ = layer.router(x, layer.expert_bias)
        inputs = {"x": x, "scores": scores, "w3": None} | dict(experts.named_parameters())
        return inputs, dout, {"ids": ids, "activation": experts.activation}

    # --- memory --------------------------------------------------------------------------------------------

    def asked(self) -> int:
        """Bytes asked of PyTorch's allocator and held, less cuBLAS's workspaces: PyTorch keeps one for each
        thread and stream that has multiplied."""
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    def allow(self, room: int | None = None) -> None:
        """Lets PyTorch allocate `room` bytes beyond those in use; None: all of its part of the device."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        part = self.args.memory_fraction
        if room is not None:
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            part = min(part, (torch.cuda.memory_reserved() + room) / total)
        torch.cuda.set_per_process_memory_fraction(part)

    def tighten(self) -> None:
        """Leaves room for the largest steps, or a little less or more."""
        self.allow(int(self.need * self.choice.uniform(0.8, 1.4)))

    @contextmanager
    def survived_out_of_memory(self, trainee: Trainee):
        try:
            yield
        except RuntimeError as error:  # PyTorch's OutOfMemoryError is one
            text = str(error).partition("\n")[0]
            if "out of memory" not in text and "aoti_torch_empty" not in text:
                raise
            if not isinstance(error, torch.OutOfMemoryError):
                self.find(f"out of memory raises {type(error).__name__}: {text}")
            self.counts["ooms survived"] += 1
            with trainee.current():
                trainee.forget()

    # --- checks --------------------------------------------------------------------------------------------

    def find(self, text: str) -> None:
        if all(text != other for _, other in self.findings):
            self.findings.append((self.counts["steps"], text))
            print(f"FINDING, seed {self.args.seed}, after {self.counts['steps']} steps: {text}", flush=True)

    def compare(self, what: str, first: dict, second: dict) -> None:
        different = [n for n, t in first.items() if not torch.equal(t, second[n])]
        if different:
            self.find(f"{what} has other bits: {', '.join(different[:5])}, {len(different)} of {len(first)}")

    def check(self) -> None:
        """After everything queued is done: losses are finite, and no memory is kept."""
        if self.is_cuda:
            torch.cuda.synchronize()
        if not all(math.isfinite(loss.item()) for loss in self.losses):
            self.find("a loss is not finite")
        self.losses.clear()
        if not self.is_cuda:
            return
        if self.asked() != self.held:
            gc.collect()  # an exception's traceback may hold tensors
        if self.asked() != self.held:
            self.find(f"{self.asked() - self.held} bytes more are held after a step")
            self.held = self.asked()

    def warm_up(self) -> None:
        """What is allocated once, and how much memory the largest steps need."""
        for trainee in self.trainees:
            with trainee.current():
                for micro_batches in (1, 2):
                    trainee.step(trainee.draw(self.max_tokens, "random", True, micro_batches), keep=True)
        if not self.is_cuda:
            return
        self.captured = CapturedStep(self.device, self.args.seed + 2)
        self.replays = concurrency.Replays(self.calls, range(2, len(self.calls.runs), 6))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(10):
            self.run_again()
        torch.cuda.synchronize()
        self.need = torch.cuda.max_memory_allocated() - before
        self.replay_graph()
        self.run_out_of_memory()
        torch.cuda.synchronize()
        self.losses.clear()
        gc.collect()
        self.held = self.asked()

    def go_on(self, end: float) -> None:
        self.warm_up()
        while time.monotonic() < end:
            (action,) = self.choice.choices(list(self.shares), self.shares.values())
            action()
            self.check()

    def run(self) -> int:
        start = time.monotonic()
        try:
            self.go_on(start + 60 * self.args.minutes)
        except Exception as error:
            traceback.print_exc()
            self.find(f"{type(error).__name__}: " + str(error).partition("\n")[0])
        minutes, num = (time.monotonic() - start) / 60, len(self.findings)
        if self.args.record:
            where = torch.cuda.get_device_name() if self.is_cuda else "cpu"
            tier = os.environ.get("FUSED_MOE_TIER", "auto") if self.is_cuda else "cpu"
            about = {"tier": tier, "seed": self.args.seed, "minutes": minutes, "findings": num}
            record.append(self.args.record, [record.make("soak", where, counts=self.counts, **about)])
        counts = ", ".join(f"{n} {name}" for name, n in self.counts.items())
        print(f"seed {self.args.seed}, {minutes:.1f} minutes: {counts}, {num} findings", flush=True)
        return 1 if num else 0


def flat(results: dict) -> dict[str, Tensor]:
    return {"loss": results["loss"]} | {f"state {i}": t for i, t in enumerate(results["state"])}


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8, help="of this part, 8 at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory-fraction", type=float, default=0.05, help="of the device's, for PyTorch")
    parser.add_argument("--record", type=Path, metavar="FILE", help="where the run's record is appended")
    args = parser.parse_args(arguments)
    if not 0 < args.minutes <= 8:
        parser.error(f"--minutes: expected up to 8, found {args.minutes}")
    return args


if __name__ == "__main__":
    sys.exit(Soak(parse()).run())

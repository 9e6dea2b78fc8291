"""Runs one FuzzCase and raises what is wrong: values and gradients against fuzz_reference in float64, several
runs bit for bit, inputs and the memory around them afterwards, rows that a planted NaN must not reach."""

import math
import os
from contextlib import ExitStack, contextmanager

import fuzz_reference as plain
import torch
from cases import F32, F64, LAYOUTS, LOOSE, assert_as_good, make_ids, poisoned, score_dtype, weight_shapes
from fuzz_cases import FuzzCase

import fused_moe

GUARD = 16  # elements around an input; 16 keep contiguous ones aligned
ALIKE = 4.0
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --- storage --------------------------------------------------------------------------------------


class Stored:
    """Values in separate memory, in some form, between guards: NaN, or 0 for integers."""

    def __init__(self, value: torch.Tensor, form: str, device):
        shape, offset = value.shape, GUARD + (3 if form in ("misaligned", "padded") else 0)
        order = list(range(value.dim()))
        if form == "swapped" and len(order) > 1:
            order[-1], order[-2] = order[-2], order[-1]
        strides, step = [0] * len(order), 2 if form == "strided" else 1
        for i, dim in enumerate(reversed(order)):
            strides[dim] = step
            step *= max(shape[dim], 1)
            step += 3 if form == "padded" and i == 0 else 0
        if order and form == "outer":
            strides[0] *= 2
        if order and form == "expanded":
            strides[0] = 0
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if value.numel() else 0
        guard = math.nan if value.is_floating_point() else 0
        flat = torch.full((offset + max(span, 0) + GUARD,), guard, dtype=value.dtype)
        view = flat.as_strided(shape, strides, offset)
        (view[:1] if form == "expanded" else view).copy_(value[:1] if form == "expanded" else value)
        self.flat = flat.to(device)
        self.before = self.flat.clone()
        self.view = self.flat.as_strided(shape, strides, offset)

    def check(self, name: str, may_change: bool = False) -> None:
        """Nothing was written, or nothing but the view."""
        before = self.before
        if may_change:
            before = before.clone()
            before.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).copy_(
                self.view
            )
        bits = BITS[before.itemsize]
        assert torch.equal(self.flat.view(bits), before.view(bits)), f"{name}: memory was written"

    def restore(self) -> None:
        self.flat.copy_(self.before)


# --- what the functions are given, and what they should return ------------------------------------


class Problem:
    """The values of a case, on the CPU. `inputs` may need gradients, `fixed` cannot."""

    slack = 2 * LOOSE  # of a million tensors some have few elements, and eager was lucky there
    of_tokens: tuple = ()  # results with a row for each token; the first is the input
    of_experts: tuple = ()
    untouched: tuple = ()  # by what is planted
    together = False  # judged as one, so that dscores is held to what its inputs' dtype allows

    def __init__(self, case: FuzzCase):
        self.case = case
        self.random = torch.Generator().manual_seed(case.seed)
        self.near = None  # tokens with an h near a kink, once the reference has run
        self.inputs, self.fixed, self.main_grads = {}, {}, {}
        self.douts = None
        self.num_rows = self.rows_in_use = case.tokens
        self.is_grouped = case.function in ("grouped_mlp", "grouped_mm")  # out has the rows that are given
        self.build()

    def draw(self, *shape, fan_in: int = 1, dtype=None) -> torch.Tensor:
        value = torch.randn(shape, dtype=F64, generator=self.random) / math.sqrt(fan_in)
        return value.to(dtype or self.case.dtype)

    def ids(self) -> torch.Tensor:
        c = self.case
        ids = make_ids(c.routing, c.tokens, c.top_k, c.num_experts, c.seed)
        return self.expanded("ids", ids)

    def group_rows(self) -> list[int]:
        """Counts of rows that are grouped already, with spare ones behind them."""
        c = self.case
        ids = make_ids(c.routing, c.tokens, 1, c.num_experts, c.seed).flatten()
        ids = ids[(ids >= 0) & (ids < c.num_experts)]
        counts = ids.bincount(minlength=c.num_experts).tolist()
        self.rows_in_use, self.num_rows = len(ids), len(ids) + c.spare
        self.all_ids = plain.ids_of_counts(counts, self.num_rows)
        return counts

    def expanded(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Every row as the first, where the form has it."""
        if self.case.form(name) == "expanded" and len(value):
            return value[:1].expand(value.shape).clone()
        return value

    def grouped_rows(self, name: str, width: int) -> torch.Tensor:
        rows = self.expanded(name, self.draw(self.num_rows, width))
        if self.case.form(name) != "expanded":
            rows[self.rows_in_use :] = math.nan
        return rows

    def draw_douts(self, outs: dict) -> None:
        """Gradients of everything differentiable, drawn once."""
        if self.douts is not None:
            return
        self.douts = {
            n: self.draw(*out.shape, dtype=out.dtype) for n, out in outs.items() if is_differentiable(n)
        }
        self.douts["out"] = dout = self.expanded("dout", self.douts["out"])
        if self.is_grouped and self.case.form("dout") != "expanded":
            dout[self.rows_in_use :] = math.nan

    def quiet(self) -> bool:
        """Makes x zero where an h is too near a kink to tell its side. Whether there was any."""
        tokens = self.near
        name = "x_rows" if "x_rows" in self.inputs else "x"
        x = self.inputs.get(name)
        if x is None or not x[tokens].count_nonzero():
            return False
        x[slice(None) if self.case.form(name) == "expanded" else tokens] = 0
        return True

    def judge(self, found: dict, eager: dict, exact: dict) -> None:
        if "expanded" in dict(self.case.forms).values():
            # Rows that are all alike err alike: one draw, where the judge counts on many.
            eager = {n: exact[n] + ALIKE * (t.double() - exact[n]) for n, t in eager.items() if n in exact}
            eager = {n: t.to(found[n].dtype) for n, t in eager.items()}
        if self.together:
            found = {n: t for n, t in found.items() if t.is_floating_point()}
            assert_as_good(found, eager, exact, self.slack)
            return
        for name in exact:
            if name.startswith("drouter") and self.case.route_norm:
                # Renormalised scores cancel: what is left errs by the rounding of <dout, out>, zero rows too.
                left = torch.finfo(F64).eps * (self.douts["out"].double() * exact["out"]).norm()
                eager[name] = eager[name] + left.to(eager[name].dtype)
            assert_as_good({name: found[name]}, {name: eager[name]}, {name: exact[name]}, self.slack)

    def place(self, inputs: dict, fixed: dict, device) -> None:
        """Puts parameters where they belong."""

    def after(self, inputs: dict) -> dict:
        """More results, that forward does not return."""
        return {}

    def notice(self, found: dict) -> None:
        """What has to be equal, or follows from our own results."""

    def notice_planted(self, found: dict, touched: dict) -> None:
        """What a planted value has to do."""

    def plant(self, inputs: dict, douts: dict) -> dict:
        """Writes case.planted into one row. {result: rows that may change}; None without rows."""
        name, value = self.case.planted
        num_tokens = len(self.inputs[self.of_tokens[0]])
        if not num_tokens:
            return None
        token = self.case.seed % num_tokens
        row = (douts["out"] if name == "dout" else inputs[name])[token]
        row[self.case.seed // 7 % len(row)] = value
        experts = self.experts_of(token)
        return {**dict.fromkeys(self.of_tokens, [token]), **dict.fromkeys(self.of_experts, experts)}


class Experts(Problem):
    together = True

    def build(self):
        c, grouped = self.case, self.is_grouped
        layout, transposed = LAYOUTS[c.layout][0], LAYOUTS[c.layout][3]
        E, D, F = c.num_experts, c.dim, c.hidden
        if grouped:
            counts = self.group_rows()
            self.fixed["counts"] = torch.tensor(counts, dtype=c.integers)
        else:
            self.all_ids = self.ids()
            self.fixed["ids"] = self.all_ids.to(c.integers)
        self.x_name = "x_rows" if grouped else "x"
        self.inputs[self.x_name] = (
            self.grouped_rows("x_rows", D) if grouped else self.expanded("x", self.draw(c.tokens, D))
        )
        shapes = weight_shapes(c.layout, E, D, F, c.bias)
        for name, shape in shapes.items():
            if shape is None:
                self.fixed[name] = None
                continue
            value = self.draw(*shape, fan_in=shape[-1] if name[0] == "w" else 1)
            value = value.mT.contiguous() if transposed and name[0] == "w" else value
            self.inputs[name] = self.expanded(name, value)
            if name in c.main_grads:
                self.main_grads[name] = self.draw(*value.shape, dtype=F32)
        if not grouped:
            scores = torch.rand(c.tokens, c.top_k, generator=self.random) + 0.1
            scores = scores.to(c.scores_dtype or score_dtype(c.dtype))
            self.inputs["scores"] = self.expanded("scores", scores)
        self.options = {
            **activation_of(c),
            "layout": layout,
            "transposed": transposed,
        }
        if not grouped:
            self.options["score_on"] = c.score_on
        self.of_tokens = (self.x_name, "out", f"d{self.x_name}", "dscores")
        self.of_experts = [f"d{n}" for n in shapes] + [f"main_grad of {n}" for n in self.main_grads]

    def call(self, inputs: dict, fixed: dict, main_grads: dict) -> dict:
        options = dict(self.options)
        if main_grads:
            options["main_grads"] = tuple(main_grads.get(n) for n in ("w1", "w2", "w3"))
        fn = getattr(fused_moe, self.case.function)
        return {"out": fn(**inputs, **fixed, **options)}

    def reference(self, inputs: dict, arithmetic, found: dict) -> dict:
        t = {"scores": None, **self.fixed, **inputs}
        weights = (t[n] for n in ("w1", "w2", "w3", "b1", "b2", "b3"))
        args = (t[self.x_name], *weights, t["scores"], self.all_ids, arithmetic)
        return {"out": plain.experts(*args, **self.options)}

    def experts_of(self, token: int) -> list[int]:
        return [e for e in self.all_ids[token].tolist() if 0 <= e < self.case.num_experts]

    def notice_planted(self, found: dict, touched: dict) -> None:
        [token] = touched["out"]
        name, value = self.case.planted
        if name == self.x_name and math.isnan(value) and self.experts_of(token):
            assert found["out"][token].isnan().all(), "out: the NaN of x is lost"


class GroupedMM(Problem):
    of_tokens, of_experts = ("a", "out", "da"), ("db",)

    def build(self):
        c = self.case
        self.counts = self.group_rows()
        self.fixed["offsets"] = torch.tensor(self.counts).cumsum(0).int()
        self.inputs["a"] = self.grouped_rows("a", c.dim)
        self.inputs["b"] = self.expanded("b", self.draw(c.num_experts, c.hidden, c.dim, fan_in=c.dim))

    def call(self, inputs, fixed, main_grads):
        return {"out": fused_moe.grouped_mm(**inputs, **fixed)}

    def reference(self, inputs, arithmetic, found):
        return {"out": plain.grouped_mm(inputs["a"], inputs["b"], self.counts, arithmetic)}

    experts_of = Experts.experts_of


class Permute(Problem):
    together = True
    untouched = ("counts", "offsets", "row_token", "row_slot", "token_row")
    of_tokens = ("x", "out", "dx", "dscores")
    of_experts = ("rows", "drows")  # the token's rows

    def build(self):
        c = self.case
        self.all_ids = self.ids()
        self.slots = plain.row_slots(self.all_ids, c.num_experts)
        self.num_rows = self.all_ids.numel()
        self.rows_in_use = len(self.slots)
        self.fixed["ids"] = self.all_ids.to(c.integers)
        self.inputs["x"] = self.expanded("x", self.draw(c.tokens, c.dim))
        self.inputs["rows"] = self.grouped_rows("rows", c.dim)
        scores = self.draw(c.tokens, c.top_k, dtype=c.scores_dtype or score_dtype(c.dtype))
        self.inputs["scores"] = self.expanded("scores", scores)

    def call(self, inputs, fixed, main_grads):
        rows, plan = fused_moe.permute(inputs["x"], fixed["ids"], self.case.num_experts)
        out = fused_moe.unpermute(inputs["rows"], plan, inputs["scores"])
        integers = {n: getattr(plan, n) for n in self.untouched}
        return {"out": out, "rows": rows, **integers}

    def reference(self, inputs, arithmetic, found):
        args = (self.slots, self.all_ids)
        return {
            "out": plain.unpermute(inputs["rows"], *args, inputs["scores"], arithmetic),
            "rows": plain.permute(inputs["x"], *args),
        }

    def notice(self, found):
        K, E = self.case.top_k, self.case.num_experts
        tail = [-1] * (self.num_rows - len(self.slots))
        row_of = {slot: row for row, slot in enumerate(self.slots)}
        counts = self.all_ids.flatten()[self.slots].bincount(minlength=E)
        expected = {
            "counts": counts.tolist(),
            "offsets": [0, *counts.cumsum(0).tolist()],
            "row_token": [slot // K for slot in self.slots] + tail,
            "row_slot": self.slots + tail,
            "token_row": [row_of.get(slot, -1) for slot in range(self.num_rows)],
        }
        for name, values in expected.items():
            assert found[name].flatten().tolist() == values, name
        assert torch.equal(found["rows"], plain.permute(self.inputs["x"], self.slots, self.all_ids)), "rows"

    def plant(self, inputs, douts):
        name, value = self.case.planted
        token = self.case.seed % self.case.tokens
        rows = [r for r, slot in enumerate(self.slots) if slot // self.case.top_k == token]
        if name != "rows":
            inputs[name][token, 0] = value
        elif rows:
            inputs[name][rows[0], 0] = value
        return {**dict.fromkeys(self.of_tokens, [token]), **dict.fromkeys(self.of_experts, rows)}


def routing_of(case: FuzzCase) -> dict:
    return {n: getattr(case, n) for n in ("score_func", "route_norm", "route_scale", "route_norm_eps")}


def groups_of(case: FuzzCase) -> dict:
    if not case.groups:
        return {}
    names = {"num_expert_groups": "groups", "num_limited_groups": "kept", "group_score": "group_score"}
    return {name: getattr(case, field) for name, field in names.items()}


def choice_of(case: FuzzCase) -> dict:
    """What check_choice is told of the case."""
    return {n: getattr(case, n) for n in ("score_func", "groups", "kept", "group_score")}


def padded(case: FuzzCase, x: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """x with rows of NaN after its tokens, and num_tokens."""
    if not case.padding:
        return x, {}
    tail = x.new_full((case.padding, x.size(1)), torch.nan)
    num_tokens = torch.full((1,), case.tokens, dtype=torch.int32, device=x.device)
    return torch.cat([x, tail]), {"num_tokens": num_tokens}


class Route(Problem):
    of_tokens, of_experts = ("logits", "out", "dlogits", "ids"), ()

    def build(self):
        c = self.case
        logits = self.draw(c.tokens, c.num_experts) * c.size
        if c.ties:
            logits = (2 * logits).round() / 2
        self.inputs["logits"] = self.expanded("logits", logits)
        if c.expert_scale:
            self.inputs["expert_scale"] = self.expanded("expert_scale", self.draw(c.num_experts))
        self.fixed["bias"] = self.draw(c.num_experts, dtype=F32) * 0.3 if c.expert_bias else None

    def call(self, inputs, fixed, main_grads):
        routing = {**routing_of(self.case), **groups_of(self.case)}
        logits, padding = padded(self.case, inputs["logits"])
        tensors = {"bias": fixed["bias"], "expert_scale": inputs.get("expert_scale")}
        out, ids = fused_moe.route(logits, self.case.top_k, **tensors, **routing, **padding)
        return {"out": out[: self.case.tokens], "ids": ids[: self.case.tokens]}

    def reference(self, inputs, arithmetic, found):
        options = {"expert_scale": inputs.get("expert_scale"), **routing_of(self.case)}
        return {"out": plain.scores_of(inputs["logits"], found["ids"], arithmetic, **options)}

    def notice(self, found):
        plain.check_choice(
            self.inputs["logits"], found["ids"], bias=self.fixed["bias"], **choice_of(self.case)
        )

    def experts_of(self, token):
        return []

    def notice_planted(self, found, touched):
        c, ids = self.case, found["ids"].sort(-1).values
        assert ((ids >= 0) & (ids < c.num_experts)).all() and (ids[:, 1:] > ids[:, :-1]).all(), "ids"
        if math.isnan(c.planted[1]) and not c.groups:
            spreads = c.expert_bias and c.score_func == "softmax"  # to all scores of the token
            first = 0 if spreads else c.seed // 7 % c.num_experts
            assert found["ids"][touched["ids"], 0] == first, "ids: NaN comes first"


def activation_of(case: FuzzCase) -> dict:
    return {"activation": case.activation, "alpha": case.alpha, "limit": case.limit}


class Layer(Problem):
    slack = 16.0  # the router's GEMM is PyTorch's, and its rounding goes through the softmax

    def build(self):
        c = self.case
        self.module = fused_moe.FusedMoE(
            c.dim, c.hidden, c.num_experts, c.top_k, **routing_of(c), **groups_of(c), dtype=c.dtype,
            num_shared_experts=c.shared, shared_expert_gate=c.shared_gate, bias=c.bias, gate_bias=c.gate_bias,
            load_balance_coeff=1e-3 if c.expert_bias else None, gated=c.layout == "separate",
            expert_scale=c.expert_scale, **activation_of(c),
        ).train(c.training)  # fmt: skip
        self.inputs["x"] = self.expanded("x", self.draw(c.tokens, c.dim))
        for name, p in self.module.named_parameters():
            fan_in = 1 if name.rpartition(".")[2][0] == "b" else p.size(-1)
            self.inputs[name] = self.expanded(name, self.draw(*p.shape, fan_in=fan_in))
        if c.expert_bias:
            self.fixed["expert_bias"] = self.draw(c.num_experts, dtype=F32) * 0.1

    def place(self, inputs, fixed, device):
        self.module.to(device)
        for name, p in self.module.named_parameters():
            p.data = inputs[name]
            p.requires_grad_(False)
            inputs[name] = p
        if fixed:
            self.module.expert_bias.copy_(fixed["expert_bias"])
        self.module.tokens_per_expert.zero_()

    def call(self, inputs, fixed, main_grads):
        x, padding = padded(self.case, inputs["x"])
        if not self.case.losses:
            return {"out": self.module(x, **padding)[: self.case.tokens]}
        out, losses = self.module(x, return_losses=True, **padding)
        return {"out": out[: self.case.tokens], "balance": losses.load_balancing, "z": losses.z}

    def after(self, inputs):
        """Makes forward's choice once more, with the same number of rows: on a CPU last bits depend on it,
        and with an expanded gate all experts have the same logits."""
        x, _ = padded(self.case, inputs["x"])
        with torch.no_grad():
            _, ids, logits = self.module.router(x, self.module.expert_bias)
        ids, logits = ids[: self.case.tokens], logits[: self.case.tokens]
        return {"ids": ids, "logits": logits, "tokens": self.module.tokens_per_expert.clone()}

    def reference(self, inputs, arithmetic, found):
        params = {n: t for n, t in inputs.items() if n != "x"}
        options = (found["ids"], routing_of(self.case), arithmetic, activation_of(self.case))
        out, logits = plain.layer(inputs["x"], params, *options)
        if not self.case.losses:
            return {"out": out}
        wide = logits if logits.dtype == F64 and self.case.dtype == F64 else logits.to(arithmetic.wide)
        balance, z = plain.losses_of(wide, found["ids"], arithmetic, self.case.score_func)
        return {"out": out, "balance": balance, "z": z}

    def notice(self, found):
        c = self.case
        plain.check_choice(found["logits"], found["ids"], bias=self.fixed.get("expert_bias"), **choice_of(c))
        counts = found["ids"].flatten().long().bincount(minlength=c.num_experts)
        assert torch.equal(found["tokens"].long(), counts * c.training), "tokens_per_expert"


PROBLEMS = {
    "fused_experts": Experts,
    "grouped_mlp": Experts,
    "grouped_mm": GroupedMM,
    "permute": Permute,
    "route": Route,
    "FusedMoE": Layer,
}


# --- running --------------------------------------------------------------------------------------


@contextmanager
def modes(case: FuzzCase, device):
    """Gradient mode and autocast."""
    with ExitStack() as stack:
        if case.grad == "no_grad":
            stack.enter_context(torch.no_grad())
        elif case.grad == "inference":
            stack.enter_context(torch.inference_mode())
        if case.autocast:
            stack.enter_context(torch.autocast(device.type, case.autocast))
        yield


def is_differentiable(name: str) -> bool:
    return name in ("out", "rows", "balance", "z")


class Run:
    """Everything of a case in memory, to be run any number of times on the same tensors."""

    def __init__(self, problem: Problem, inputs: dict, device):
        self.problem, self.case, self.device = problem, problem.case, device
        self.stored = {n: self.store(n, v) for n, v in {**inputs, **problem.fixed}.items() if v is not None}
        self.main_grads = {n: self.store(n, v, is_main_grad=True) for n, v in problem.main_grads.items()}
        self.douts, self.zeros = {}, {}
        self.fn = problem.call
        if self.case.mode != "eager":
            dynamic = (None, True, False)[self.case.seed % 3]
            self.fn = torch.compile(self.fn, backend=self.case.mode, fullgraph=True, dynamic=dynamic)

    def store(self, name: str, value: torch.Tensor, is_main_grad: bool = False) -> Stored:
        form = self.case.form(name)
        if form == "expanded" and (is_main_grad or name in ("counts", "offsets")):
            form = "outer"  # separate elements
        if form == "swapped" and is_main_grad and value.dim() == 4:
            form = "outer"  # has to be (E, 2F, D), too
        is_cast = self.case.autocast is not None and value.dtype == self.case.autocast
        return Stored(value.float() if is_cast else value, form, self.device)

    def __call__(self, douts: dict | None = None) -> dict:
        """{"out", "d<input>", "main_grad of <weight>", ...} on the device."""
        problem, case = self.problem, self.case
        inputs = {n: self.stored[n].view.detach() for n in problem.inputs}
        fixed = {n: v if v is None else self.stored[n].view for n, v in problem.fixed.items()}
        main_grads = {}
        for name, stored in self.main_grads.items():
            stored.restore()
            main_grads[name] = stored.view
        problem.place(inputs, fixed, self.device)
        needed = [n for n in inputs if case.grad == "grad" and n not in case.frozen]
        leaves = {n: inputs[n].requires_grad_() for n in needed}
        with modes(case, self.device):
            outs = self.fn(inputs, fixed, main_grads)
        results = {n: t.detach() for n, t in outs.items()}
        heads = {n: t for n, t in outs.items() if t.requires_grad}
        assert leaves or not heads, f"{[*heads]} require a gradient though no input does"
        if heads:
            self.differentiate(results, outs, heads, leaves, douts)
        results |= {f"main_grad of {n}": t.clone() for n, t in main_grads.items()}
        return results | problem.after(inputs)

    def differentiate(self, results: dict, outs: dict, heads: dict, leaves: dict, douts: dict | None) -> None:
        """Adds the gradients to the results."""
        if not self.douts:
            self.problem.draw_douts(outs)
            for name, value in (douts or self.problem.douts).items():
                form = self.case.form("dout") if name == "out" else "contiguous"
                self.douts[name] = Stored(value, form, self.device)
        given = [self.douts[n].view for n in heads]
        grads = torch.autograd.grad([*heads.values()], [*leaves.values()], given, allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            if name in self.main_grads:
                # zeros, which `check_zeros` reads after a capture; None where it is compiled
                assert grad is not None or self.case.mode != "eager", f"d{name} beside its main_grad is None"
                self.zeros[name] = grad
                continue
            assert grad is not None, f"d{name} is None"
            assert grad.shape == leaf.shape and grad.dtype == leaf.dtype, f"d{name}: {grad.dtype}"
            results[f"d{name}"] = grad

    def check_zeros(self) -> None:
        for name, grad in self.zeros.items():
            assert grad is None or not grad.any(), f"d{name} beside its main_grad"

    def check_memory(self) -> None:
        for name, stored in {**self.stored, **self.douts}.items():
            stored.check(name)
        for name, stored in self.main_grads.items():
            stored.check(f"main_grad of {name}", may_change=True)


def check(case: FuzzCase, device="cpu") -> None:
    """Raises AssertionError, or what the call itself raises, if anything about the case is wrong."""
    device = torch.device(device)
    problem = PROBLEMS[case.function](case)
    with poisoned(), tier_of(case, device), compiled_anew(case):
        run, found = run_once(problem, device)
        exact = reference_of(problem, plain.exact(case.dtype), found)
        if problem.quiet():
            run, found = run_once(problem, device)
            exact = reference_of(problem, plain.exact(case.dtype), found)
        run.check_zeros()
        check_again(run, found)
        run.check_zeros()
        run.check_memory()
        eager = exact if case.dtype == F64 else reference_of(problem, plain.eager(case.dtype), found)
        eager = {n: t.to(found[n].dtype) for n, t in eager.items()}
        problem.judge(found, eager, exact)
        problem.notice(found)
        if case.planted:
            check_planted(problem, found, device)


@contextmanager
def compiled_anew(case: FuzzCase):
    """Forgets the graphs afterwards: PyTorch keeps a few of each function, then refuses more."""
    try:
        yield
    finally:
        if case.mode != "eager":
            torch._dynamo.reset()


@contextmanager
def tier_of(case: FuzzCase, device):
    """FUSED_MOE_TIER for the case, where there are tiers to choose from."""
    if device.type != "cuda":
        yield
        return
    before = os.environ.get("FUSED_MOE_TIER")
    _ask_for(case.tier or before)
    try:
        yield
    finally:
        _ask_for(before)


def _ask_for(tier: str | None) -> None:
    if tier == os.environ.get("FUSED_MOE_TIER"):
        return
    os.environ.pop("FUSED_MOE_TIER", None)
    if tier:
        os.environ["FUSED_MOE_TIER"] = tier
    torch.ops.fused_moe.cuda_reset()


def on_cpu(results: dict) -> dict:
    return {n: t.cpu() for n, t in results.items()}


def run_once(problem: Problem, device, inputs: dict | None = None, douts: dict | None = None):
    run = Run(problem, inputs or problem.inputs, device)
    results = on_cpu(run(douts))
    run.check_memory()
    return run, results


def reference_of(problem: Problem, arithmetic: plain.Arithmetic, found: dict) -> dict:
    """The results that fuzz_reference gives, for those of `found` that it knows."""
    case, is_exact = problem.case, arithmetic.wide == F64
    needed = [n for n in problem.inputs if case.grad == "grad" and n not in case.frozen]
    inputs = {n: t.to(F64) if is_exact else t for n, t in problem.inputs.items()}
    leaves = {n: inputs[n].detach().requires_grad_() for n in needed}
    outs = problem.reference({**inputs, **leaves}, arithmetic, found)
    problem.near = torch.cat([torch.empty(0, dtype=torch.long), *arithmetic.near])
    results = {n: t.detach() for n, t in outs.items()}
    heads = {n: t for n, t in outs.items() if t.requires_grad}
    grads = [None] * len(leaves)
    if heads:
        douts = [problem.douts[n].to(t.dtype) for n, t in heads.items()]
        grads = torch.autograd.grad([*heads.values()], [*leaves.values()], douts, allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        grad = torch.zeros_like(leaf) if grad is None else grad
        if name in problem.main_grads:
            grad = problem.main_grads[name].to(arithmetic.wide) + grad.to(arithmetic.wide)
            name = f"main_grad of {name}"
        else:
            name = f"d{name}"
        results[name] = grad
    for name in problem.main_grads:
        results.setdefault(f"main_grad of {name}", problem.main_grads[name].to(arithmetic.wide))
    return results


def check_again(run: Run, found: dict) -> None:
    """The same bits once more: with another number of threads, or on a side stream, or from a graph."""
    case, device = run.case, run.device
    if device.type == "cpu":
        # PyTorch's own GEMMs, which compiled code and the router have, may depend on the threads.
        more = case.mode == "eager" and case.function != "FusedMoE"
        with threads(2 if more else 1):
            assert_same(found, run(), "a second run")
        return
    assert_same(found, on_cpu(run()), "a second run")
    if case.stream:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            results = run()
        torch.cuda.current_stream().wait_stream(side)
        assert_same(found, on_cpu(results), "a side stream")
    if case.graph and case.mode == "eager":
        graph, results = torch.cuda.CUDAGraph(), None
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            results = run()
        for _ in range(2):
            graph.replay()
            assert_same(found, on_cpu(results), "a graph")


@contextmanager
def threads(number: int):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_same(found: dict, again: dict, where: str) -> None:
    assert found.keys() == again.keys(), where
    for name, value in found.items():
        assert torch.equal(value, again[name]), f"{where}: {name} differs"


def check_planted(problem: Problem, clean: dict, device) -> None:
    """What does not involve the token with the NaN or infinity is the same to the last bit."""
    inputs = {n: t.clone() for n, t in problem.inputs.items()}
    douts = {n: t.clone() for n, t in problem.douts.items()} if problem.douts else None
    if problem.case.planted[0] == "dout" and douts is None:
        return
    touched = problem.plant(inputs, douts)
    if touched is None:
        return
    _, found = run_once(problem, device, inputs, douts)
    for name, value in clean.items():
        other = found[name]
        if value.dim() and name in touched:
            kept = torch.ones(len(value), dtype=torch.bool)
            kept[touched[name]] = False
            value, other = value[kept], other[kept]
        elif name not in problem.untouched:
            continue
        assert torch.equal(value, other), f"{name}: {problem.case.planted[1]} of another token's row"
    problem.notice_planted(found, touched)

"""balance and load_report: every FusedMoE of a model at once."""

import copy
import warnings

import pytest
import torch
from cases import F32

import fused_moe
from fused_moe import FusedMoE, balance, load_report, reference
from fused_moe.module import PATIENCE

E = 4


def new_layer(num_experts=E, coefficient=0.5, **options):
    return FusedMoE(8, 4, num_experts, 1, load_balance_coeff=coefficient, **options)


class Model(torch.nn.Module):
    """Layers of several sizes, one without a bias, and one that is in two places."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(1)
        blocks = [
            new_layer(device=device),
            new_layer(6, 0.25, device=device),
            new_layer(5, None, device=device),
        ]
        self.blocks = torch.nn.ModuleList(blocks)
        self.again = self.blocks[0]

    def forward(self, x):
        for block in (*self.blocks, self.again):
            x = x + block(x)
        return x


def train(model, optimizer, steps, update=lambda: None):
    """The biases after each step."""
    found = []
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        x = torch.randn(20, 8, generator=generator).to(next(model.parameters()).device)
        model(x).square().sum().backward()
        optimizer.step()
        update()
        found.append([b.clone() for b in model.buffers()])
    return found


@pytest.mark.quick
@pytest.mark.parametrize(
    "wrap", (lambda m: m, torch.nn.DataParallel, torch.compile), ids="plain inside compiled".split()
)
def test_the_bits_of_each_layers_update(device, wrap):
    """After every step the biases are those of update_expert_bias of each layer, a shared one once. Counts of
    layers with a bias are zero, those of others go on."""
    model = Model(device)
    expected = copy.deepcopy(model)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 1e-2)
    balance(wrapped, optimizer)
    found = train(model, optimizer, 3)
    blocks = expected.blocks[:2]

    def update():
        for block in blocks:
            block.update_expert_bias()

    twin = torch.optim.SGD(expected.parameters(), 1e-2)
    for a, b in zip(found, train(expected, twin, 3, update), strict=True):
        assert len(a) == len(b) == 2 and all(map(torch.equal, a, b))
    assert any(bias.any() for bias in found[-1])
    assert not any(block.tokens_per_expert.any() for block in model.blocks[:2])
    assert model.blocks[2].tokens_per_expert.sum() == 3 * 20


def test_the_end_of_balancing(device):
    """remove() of the handle: later steps move no bias."""
    model = Model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = balance(model, optimizer)
    first = train(model, optimizer, 1)[-1]
    handle.remove()
    assert all(map(torch.equal, train(model, optimizer, 2)[-1], first))
    assert model.blocks[0].tokens_per_expert.sum() == 2 * 2 * 20


def test_a_step_without_tokens_moves_no_bias(device):
    """That of a second optimizer, say, or PyTorch's that makes the state of an optimizer to be loaded."""
    model = Model(device)
    optimizers = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    for optimizer in optimizers:
        balance(model, optimizer)
    first = train(model, optimizers[0], 1)[-1]
    optimizers[1].step()
    assert all(map(torch.equal, model.buffers(), first))


def test_a_step_that_a_scaler_skips(device):
    """After an overflow no bias moves; its tokens count in the next step."""
    model = Model(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    balance(model, optimizer)
    scaler = torch.amp.GradScaler(device.type)
    for factor, moved in ((torch.inf, False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(20, 8, device=device)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(bias.any() == moved for bias in model.buffers())
        assert model.blocks[0].tokens_per_expert.sum() == (0 if moved else 2 * 20)


def test_layers_of_the_reference(device):
    """Its layer is balanced alike."""
    torch.manual_seed(1)
    layer = reference.FusedMoE(8, 4, 4, 1, load_balance_coeff=0.5, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), 1e-2)
    balance(layer, optimizer)
    assert train(layer, optimizer, 1)[-1][0].any()


def test_counts_left_on_meta(device):
    """Parameters that came by assignment: nothing was counted, nothing is moved, the counts move to them."""
    layer = new_layer(device="meta")
    layer.load_state_dict(new_layer(device=device).state_dict(), assign=True)
    assert layer.tokens_per_expert.is_meta
    optimizer = torch.optim.SGD(layer.parameters(), 1e-2)
    balance(layer, optimizer)
    optimizer.step()
    assert layer.tokens_per_expert.device == layer.expert_bias.device and not layer.expert_bias.any()


def test_no_warning_of_a_forgotten_update(device):
    layer = new_layer(device=device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    balance(layer, optimizer)
    x = torch.randn(2, 8, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            for _ in range(PATIENCE - 1):
                layer(x)
            optimizer.step()


def test_wrong_calls(cpu):
    """The layer's errors come from balance itself, a bias's of another dtype from the step."""
    layer, plain = new_layer(), new_layer(coefficient=None)
    optimizer = torch.optim.SGD(layer.parameters(), 1e-2)
    wrong = (
        ((3, optimizer), TypeError,
         "balance: expected model to be a module with a FusedMoE in it, found int"),
        ((torch.nn.Linear(2, 2), optimizer), ValueError,
         "balance: expected model to be a module with a FusedMoE in it, found Linear"),
        ((plain, optimizer), ValueError,
         "balance: expected a model with a FusedMoE that has a load_balance_coeff, found none that has"),
        ((layer, layer), TypeError,
         "balance: expected optimizer to be a torch.optim.Optimizer, found FusedMoE"),
        ((layer, optimizer, "world"), TypeError,
         "balance: expected group to be a ProcessGroup that this rank is in, found str"),
    )  # fmt: skip
    for (model, other, *group), error, message in wrong:
        with pytest.raises(error) as raised:
            balance(model, other, group=group[0] if group else None)
        assert str(raised.value) == message
    for model, error, found in ((None, TypeError, "NoneType"), (torch.nn.Identity(), ValueError, "Identity")):
        with pytest.raises(error) as raised:
            load_report(model)
        message = "load_report: expected model to be a module with a FusedMoE in it"
        assert str(raised.value) == f"{message}, found {found}"
    balance(layer, optimizer)
    layer.expert_bias = layer.expert_bias.half()
    with pytest.raises(TypeError, match="expected expert_bias of dtype float32, found torch.float16"):
        optimizer.step()


# --- the report -------------------------------------------------------------------------------------------


def counted(*tokens, **options):
    layer = new_layer(len(tokens), **options)
    layer.tokens_per_expert.copy_(torch.tensor(tokens))
    return layer


def test_report(device):
    """Each layer's own report by its name; as a text a line for each, experts by their load over the mean."""
    model = torch.nn.ModuleDict(
        {
            "even": counted(5, 5, 5, 5, device=device),
            "skewed": counted(0, 3, 4, 9, 16, 0, 0, 0, device=device),
            "plain": counted(0, 0, 12_345_678, coefficient=None, device=device),
        }
    )
    report = load_report(model)
    assert list(report.layers) == ["even", "skewed", "plain"]
    for name, layer in model.items():
        own, other = report.layers[name], layer.load_report()
        assert torch.equal(own.tokens, other.tokens) and torch.equal(own.share, other.share)
        assert own[2:] == other[2:] and not own.tokens.is_cuda
    assert report.max_over_mean == 4.0 and report.idle == 4 + 2
    assert str(report).splitlines() == [
        "load of 3 layers; experts by their load over the mean",
        "layer                       tokens  max/mean  idle  <1/2    <1    <2    <4    4+",
        "even                            20      1.00     0     0     0     4     0     0",
        "skewed                          32      4.00     4     0     1     1     1     1",
        "plain                     1.23e+07      3.00     2     0     0     0     1     0",
    ]
    model["even"].tokens_per_expert.zero_()
    assert report.layers["even"].tokens.sum() == 20


@pytest.mark.parametrize("num_layers", (1, 22, 23, 48, 200))
def test_a_report_fits_a_screen(cpu, num_layers):
    """80 columns, 24 lines: of neighbours the least balanced one, and the least balanced of all."""
    layers = [counted(*[i % 7 + 1] * 2, 8, 1000 + i) for i in range(num_layers)]
    blocks = torch.nn.ModuleList(torch.nn.ModuleDict({"block_sparse_moe": layer}) for layer in layers)
    report = load_report(torch.nn.ModuleDict({"layers": blocks}))
    assert len(report.layers) == num_layers
    lines = str(report).splitlines()
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
    assert len(lines) == 2 + -(-num_layers // -(-num_layers // 22))
    shown = {line.split()[2] for line in lines[2:]}
    assert f"{report.max_over_mean:.2f}" in shown
    if num_layers == 48:
        assert lines[0] == "load of 48 layers, the worst of each 3; experts by their load over the mean"
        assert [line.split()[0] for line in lines[2:4]] == [
            "..rs.0.block_sparse_moe",
            "..rs.3.block_sparse_moe",
        ]


@pytest.mark.parametrize("num_experts", (20, 21, 256, 1024))
def test_the_report_of_a_layer_fits_a_screen(cpu, num_experts):
    """80 columns, 24 lines: of more than 20 experts the busiest ones and the least busy ones."""
    tokens = torch.arange(num_experts).roll(5) * 1_000_000
    lines = str(counted(*tokens.tolist()).load_report()).splitlines()
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
    assert lines[0].endswith(f"x the mean, 1 of {num_experts} experts are idle")
    shown = [int(line.split()[0]) for line in lines if line.split()[0].isdigit()]
    if num_experts == 20:
        assert shown == [*range(20)]
        return
    order = [e % num_experts for e in range(num_experts + 4, 4, -1)]  # the busiest first
    assert shown == order[:12] + order[-6:]
    assert lines[1].split() == ["over", "the", "mean", "idle", "<1/2", "<1", "<2", "<4", "4+"]
    assert sum(map(int, lines[2].split()[1:])) == num_experts and int(lines[2].split()[1]) == 1
    assert f"     ...  {num_experts - 18} others" in lines


def test_report_before_any_token(device):
    model = Model(device)
    assert str(load_report(model)) == str(model.blocks[0].load_report())
    assert load_report(model).max_over_mean == 0.0 and list(load_report(model).layers) == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    layer = new_layer(device="meta")
    assert load_report(layer).layers[""].tokens.tolist() == [0] * E
    assert fused_moe.ModelLoadReport(load_report(layer).layers).idle == E
    assert load_report(layer).layers[""].share.dtype == F32

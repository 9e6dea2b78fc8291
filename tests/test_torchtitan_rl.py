"""The override in TitanRL, torchtitan's reinforcement learning: trainer and generator build our layers.

torchtitan's own code parses the flags and builds both models, on the CPU. What it imports beside torchtitan
(Monarch, TorchStore, vLLM, renderers) needs GPUs or other processes and is absent here: empty modules take
its place, so calls into it do nothing.
"""

import copy
import importlib
import sys
import warnings
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
if not all(map(find_spec, ("torchtitan.config.override", "torchtitan.experiments.rl"))):
    pytest.skip("this torchtitan has no overrides, or no experiments.rl", allow_module_level=True)

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend  # noqa: E402

ABSENT = ("monarch", "torchstore", "vllm", "renderers", "cloudpickle")
NAME = "fused_moe.torchtitan.fused_moe"
FLAGS = ["--trainer.override.imports", NAME, "--generator.override.imports", NAME]
CONFIG = ["--module", "alphabet_sort", "--config", "rl_grpo_qwen3_moe_debug_varlen_batch_invariant"]
DEGREES = ("data-parallel{}", "tensor-parallel", "expert-parallel")
ALONE = [  # each side on one rank
    flag
    for side, shard in (("trainer", "-shard"), ("generator", ""))
    for name in DEGREES
    for flag in (f"--{side}.parallelism.{name.format(shard)}-degree", "1")
]


class AbsentClass(type):
    """A class whose attributes are their names."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class AbsentModule(ModuleType):
    """Has every class, and every other name as a module that is a decorator, too."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value = AbsentClass(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        decorates = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if decorates else self


class AbsentFinder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec):
        return AbsentModule(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module")
def rl():
    """torchtitan's classes of trainer and generator, in a world of this process alone."""
    patch, before, finder = pytest.MonkeyPatch(), set(sys.modules), AbsentFinder()
    patch.setattr(sys, "meta_path", [finder, *sys.meta_path])  # first: installed ones are absent, too
    for name in [name for name in sys.modules if name.split(".")[0] in ABSENT]:
        patch.delitem(sys.modules, name)
    of_vllm = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
    backend = get_spmd_backend()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it sets an environment variable of PyTorch's, late
        from torchtitan.experiments.rl.actors.generator import VLLMGenerator
        from torchtitan.experiments.rl.actors.trainer import PolicyTrainer
        from torchtitan.experiments.rl.models.vllm_wrapper import VLLMModelWrapper
    sys.modules["vllm.config"].get_current_vllm_config = lambda: of_vllm
    yield SimpleNamespace(trainer=PolicyTrainer, generator=VLLMGenerator, wrapper=VLLMModelWrapper)
    dist.destroy_process_group()
    set_spmd_backend(backend)  # which the generator's model has set
    patch.undo()
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ABSENT or name.startswith("torchtitan.experiments.rl"):
            del sys.modules[name]


def parse(*flags):
    return ConfigManager().parse_args([*CONFIG, *ALONE, *flags])


def spec_of(config):
    """What a process of either side gets. On one rank there is nothing to parallelise."""
    return replace(copy.deepcopy(config.model_spec), parallelize_fn=lambda model, **_: model)


def trainer_model(rl, config):
    trainer = SimpleNamespace(parallel_dims=None, compile_config=None)
    return rl.trainer._build_model(trainer, spec_of(config), config.trainer, "cpu")


def generator_model(rl, config):
    """The model inside vLLM's, made with what the generator registers."""
    side = config.generator
    of_vllm = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        device_config=SimpleNamespace(device="cpu"),
    )
    return rl.wrapper(
        model_spec=spec_of(config),
        parallelism=side.parallelism,
        compile_config=config.compile,
        checkpoint_config=side.checkpoint,
        vllm_config=of_vllm,
        override=side.override,
    ).model


def layers(model):
    return [block.moe for block in model.layers.values()]


def are_ours(model):
    found = {type(layer).__module__ for layer in layers(model)}
    assert len(found) == 1
    return found.pop().startswith("fused_moe.")


@pytest.mark.parametrize("side", ("trainer", "generator"))
def test_each_side_has_its_flag(rl, side):
    config = parse(f"--{side}.override.imports", NAME)
    assert type(config.trainer) is rl.trainer.Config and type(config.generator) is rl.generator.Config
    assert are_ours(trainer_model(rl, config)) == (side == "trainer")
    assert are_ours(generator_model(rl, config)) == (side == "generator")


def test_both_sides_compute_the_same(rl):
    """The generator takes the trainer's state dict. The same tokens have the same bits."""
    config = parse(*FLAGS)
    trainer, generator = trainer_model(rl, config), generator_model(rl, config)
    assert are_ours(trainer) and are_ours(generator) and len(layers(trainer)) > 1
    torch.manual_seed(0)
    x = torch.randn(1, 24, config.model_spec.model.dim)
    for ours, other in zip(layers(trainer), layers(generator), strict=True):
        other.load_state_dict(ours.state_dict())
        with torch.no_grad():
            out = other(x)
        assert out.any() and torch.equal(ours(x), out)

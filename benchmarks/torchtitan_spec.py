"""bench_torchtitan.py's part inside torchtitan's trainer: --experimental.custom_import=torchtitan_spec.

It registers a TrainSpec for deepseek_v3 with its own flavours, and with a metrics processor that writes
every step's figures, unrounded, as one line of JSON. The environment variable BENCH_TORCHTITAN has the
program's settings.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import time
from pathlib import Path

import moe_profile
import torch
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models import deepseek_v3
from torchtitan.models.moe import MoE
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

SETTINGS = json.loads(os.environ["BENCH_TORCHTITAN"])
IS_FIRST = os.environ.get("RANK", "0") == "0"

IS_OURS = SETTINGS["variant"].startswith("fused_moe")

if IS_OURS:
    import fused_moe.torchtitan  # noqa: F401 - registers the converters


def flavors(use_grouped_mm: bool) -> dict:
    """torchtitan's flavours, the 16B with a small vocabulary, and six of its layers: a model for two GPUs.

    SETTINGS["layers"] is another number of layers, for each of them.
    """
    args = dict(deepseek_v3.deepseekv3_args)
    args["16B"] = dataclasses.replace(args["16B"], vocab_size=2048, attn_type="sdpa", attn_mask_type="causal")
    args["16B6"] = dataclasses.replace(args["16B"], n_layers=6)
    return {
        name: dataclasses.replace(
            flavor,
            n_layers=SETTINGS["layers"] or flavor.n_layers,
            moe_args=dataclasses.replace(flavor.moe_args, use_grouped_mm=use_grouped_mm),
        )
        for name, flavor in args.items()
    }


class Recorder(MetricsProcessor):
    """torchtitan's processor; also writes SETTINGS["record"], and profiles the last steps on rank 0."""

    profiler = None

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None) -> None:
        entry = {
            "step": step,
            "loss": float(global_avg_loss),
            "grad_norm": float(grad_norm),
            "seconds": time.perf_counter() - self.time_last_log,
            "data_seconds": sum(self.data_loading_times),
            "tokens": self.ntokens_since_last_log,
            "peak_gib": self.device_memory_monitor.get_peak_stats().max_active_gib,
            "profiled": self.profiler is not None,
        }
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if not IS_FIRST:
            return
        self.write(entry)
        steps = self.job_config.training.steps
        if step == steps and self.profiler is not None:
            self.write({"profile": self.stop_profiler()})
        elif SETTINGS["profile"] and step == steps - SETTINGS["profile"]:
            self.start_profiler()
        if step == steps:
            self.write({"model": self.describe()})
        self.time_last_log = time.perf_counter()

    def write(self, entry: dict) -> None:
        with Path(SETTINGS["record"]).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def modules(self) -> list:
        return [module for part in self.model_parts for module in part.modules()]

    def start_profiler(self) -> None:
        blocks = [m for m in self.modules() if isinstance(getattr(m, "moe", None), MoE)]
        self.marks = moe_profile.Marks((m for m in self.modules() if isinstance(m, MoE)), blocks)
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, kinds.CUDA] if torch.cuda.is_available() else [kinds.CPU]
        self.profiler = torch.profiler.profile(activities=activities)
        self.profiler.start()

    def stop_profiler(self) -> dict:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.profiler.stop()
        self.marks.remove()
        record = Path(SETTINGS["record"])
        path = str(record.with_suffix(".trace.json.gz"))
        self.profiler.export_chrome_trace(path)
        record.with_suffix(".nodes.json").write_text(json.dumps(self.marks.nodes))
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        return moe_profile.by_part(events, self.marks.nodes, SETTINGS["profile"])

    def describe(self) -> dict:
        """The modules that computed, for the record."""
        layers = [m for m in self.modules() if isinstance(m, MoE)]
        found = {
            "parameters": sum(p.numel() for part in self.model_parts for p in part.parameters()),
            "moe_layers": len(layers),
            "moe": _full_name(layers[0]),
            "experts": _full_name(layers[0].experts),
            "use_grouped_mm": layers[0].experts.use_grouped_mm,
        }
        if IS_OURS:
            info = fused_moe.info()
            found["fp8"] = sum(getattr(layer.experts, "fp8", None) is not None for layer in layers)
            found |= {"fused_moe": info["fused_moe"], "tiers": info["tiers"], "calls": info["calls"]}
        return found


def _full_name(module) -> str:
    cls = next(
        c for c in type(module).__mro__ if not c.__name__.startswith("FSDP")
    )  # fully_shard adds a class
    return f"{cls.__module__}.{cls.__name__}"


def spec() -> TrainSpec:
    return dataclasses.replace(
        deepseek_v3.get_train_spec(),
        model_args=flavors(SETTINGS["variant"] != "loop"),
        build_metrics_processor_fn=lambda job_config, parallel_dims, model_args=None, tag=None: Recorder(
            job_config, parallel_dims, tag
        ),
    )


def wait_for_start() -> None:
    """Waits after the imports until bench_torchtitan.py starts this run: the previous one may still run."""
    parent = os.getppid()
    while SETTINGS["start_file"] and not Path(SETTINGS["start_file"]).exists():
        if os.getppid() != parent:
            raise SystemExit("torchrun is gone")
        time.sleep(0.02)


register_train_spec("deepseek_v3", spec())
wait_for_start()

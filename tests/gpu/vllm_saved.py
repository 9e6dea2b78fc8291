"""Small quantised models, saved by save_pretrained, in vLLM engines on one GPU, against transformers.

    python tests/gpu/vllm_saved.py [--formats int4 fp8_block mxfp4] [--folder FOLDER]

Needs vLLM 0.33.0 and transformers. For each format it makes a model, notes what that computes and saves it to
FOLDER/FORMAT (3 MB), unless it is there. Then three processes load it: transformers with "fused_moe", vLLM
with its own experts, and vLLM with ours. A line for each compares the log-probabilities of the same prompts,
and counts the greedy tokens that are the same. The weights are random, so two near logits may change places:
that shows in the tokens, not in the log-probabilities. Activations of fp8 and int8 are quantised per token,
but those of fp8_block per 128 columns in vLLM's own experts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FORMATS = {
    "int4": {"format": "int4"},
    "int4_zeros": {"format": "int4", "group_size": 64, "symmetric": False},
    "int8": {"format": "int8", "compute": "int8"},
    "fp8": {"format": "fp8", "compute": "fp8"},
    "fp8_block": {"format": "fp8_block", "compute": "fp8"},
    "mxfp4": {"format": "mxfp4"},
}
ENGINES = ("transformers", "vllm", "vllm_fused_moe")
VOCABULARY, PROMPT, NEW = 1024, 48, 16
RESULT = "RESULT "


def prompts() -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (8, PROMPT), generator=generator).tolist()


def make(folder: Path, options: dict) -> None:
    """A model whose logits differ by several units, with quantised experts, saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import fused_moe.transformers

    fused_moe.transformers.register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, moe_intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=1024, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="fused_moe"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, (3 if "lm_head" in name else 1) * parameter.size(-1) ** -0.5)
    fused_moe.transformers.quantize_experts(model, **options)
    model.save_pretrained(folder)
    (folder / "expected.json").write_text(json.dumps(computed_by(model)))


def by_transformers(folder: Path) -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    import fused_moe.transformers

    fused_moe.transformers.register()
    settings = {"experts_implementation": "fused_moe", "dtype": torch.bfloat16}
    return computed_by(AutoModelForCausalLM.from_pretrained(folder, **settings))


def computed_by(model) -> dict:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    ids = torch.tensor(prompts(), device=device)
    with torch.no_grad():
        logprobs = model(ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
        settings = {"attention_mask": torch.ones_like(ids), "eos_token_id": -1}
        tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False, **settings)
    return {"logprobs": logprobs[..., 0].tolist(), "tokens": tokens[:, PROMPT:].tolist()}


def by_vllm(folder: Path, engine: str) -> dict:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ.update(VLLM_USE_FLASHINFER_SAMPLER="0", FUSED_MOE_VLLM="1" if engine == ENGINES[-1] else "0")
    if engine == ENGINES[-1]:
        import fused_moe.vllm

        fused_moe.vllm.register()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder), load_format="auto", enforce_eager=True, skip_tokenizer_init=True, dtype="bfloat16",
        max_model_len=256, max_num_seqs=8, gpu_memory_utilization=0.3, seed=0, enable_prefix_caching=False,
    )  # fmt: skip
    settings = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0
    )
    given = prompts()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in given], settings, use_tqdm=False)
    logprobs = [
        [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        for output, ids in zip(outputs, given, strict=True)
    ]
    return {"logprobs": logprobs, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}


def in_process(*arguments: str) -> dict | None:
    """The result of this file with these arguments in a process of its own, which frees the GPU."""
    command = [sys.executable, __file__, *arguments]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith(RESULT)]
    return json.loads(lines[-1].removeprefix(RESULT)) if lines and run.returncode == 0 else None


def compare(found: dict, expected: dict) -> str:
    pairs = [
        (a, b)
        for x, y in zip(found["logprobs"], expected["logprobs"], strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    errors = [abs(a - b) for a, b in pairs]
    mean = sum(b for _, b in pairs) / len(pairs)
    spread = (sum((b - mean) ** 2 for _, b in pairs) / len(pairs)) ** 0.5
    tokens = [sum(run["tokens"], []) for run in (found, expected)]
    same = sum(a == b for a, b in zip(*tokens, strict=True))
    error = f"{sum(errors) / len(errors):.4f} on average, {max(errors):.4f} at most"
    differ = f"log-probabilities (standard deviation {spread:.2f}) differ by {error}"
    return f"{differ}; {same} of {len(tokens[0])} tokens are the same"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["int4", "fp8_block", "mxfp4"], choices=FORMATS)
    parser.add_argument("--folder", type=Path, help="where models are kept; default: a temporary one")
    parser.add_argument(
        "--engine", choices=("transformers", *ENGINES), help="compute one model, for this program"
    )
    arguments = parser.parse_args()
    if arguments.engine is not None:
        by = arguments.engine
        found = by_transformers(arguments.folder) if by == "transformers" else by_vllm(arguments.folder, by)
        print(RESULT + json.dumps(found), flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.formats:
            folder = (arguments.folder or Path(temporary)) / name
            if not (folder / "expected.json").exists():
                make(folder, FORMATS[name])
            expected = json.loads((folder / "expected.json").read_text())
            for engine in ENGINES:
                found = in_process("--folder", str(folder), "--engine", engine)
                verdict = "failed" if found is None else compare(found, expected)
                print(f"VERDICT {name}, {engine}: {verdict}", flush=True)


if __name__ == "__main__":
    main()

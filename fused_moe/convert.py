"""python -m fused_moe.convert IN OUT --to LAYOUT: a checkpoint's folder in another layout."""

import argparse
import logging
import signal
import sys

import torch

from .checkpoint.converting import LAYOUTS, convert
from .checkpoint.files import MAX_SHARD_SIZE

DTYPES = ("bfloat16", "float16", "float32")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fused_moe.convert",
        description="Writes a checkpoint's folder in another layout. docs/checkpoints.md has the layouts.",
    )
    add = parser.add_argument
    add(
        "source",
        metavar="IN",
        help="folder of a Hugging Face checkpoint, one of --to fused_moe, or torchtitan's",
    )
    add("out", metavar="OUT", help="the new folder; nothing is written over")
    add("--to", choices=LAYOUTS, required=True, help="whose names tensors get")
    add("--config", help="config.json, or its folder (default: IN's; torchtitan's has none)")
    add("--dtype", choices=DTYPES, help="of float tensors (default: each one's own)")
    add("--dequantize", action="store_true", help="make quantised weights float")
    add("--max-shard-size", metavar="SIZE", default=MAX_SHARD_SIZE, help="of a file (default: %(default)s)")
    add("--flavor", help="of torchtitan's model, from or to its layout")
    add("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    options = {
        name: getattr(args, name) for name in ("to", "config", "dequantize", "max_shard_size", "flavor")
    }
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("fused_moe").setLevel(logging.INFO)  # lines in place of a bar
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    try:
        convert(args.source, args.out, dtype=dtype, progress=not args.quiet, **options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()

"""The build backend of pyproject.toml: setuptools.build_meta, and a PyTorch to compile against.

pip builds in a separate environment that holds only what the backend asks for. Asking for torch would
download gigabytes for a few headers, so it is asked for only where find_torch() of setup.py finds none.
"""

import os
import runpy
import sys

try:
    from setuptools import build_meta
    from setuptools.build_meta import *  # noqa: F403 - the hooks that are not changed
except ImportError:  # as in a new environment of Python 3.12
    raise SystemExit(
        "fused_moe is built by setuptools and ninja: pip install without --no-build-isolation, "
        "or first pip install 'setuptools>=77' 'ninja>=1.11'"
    ) from None

TERMINAL = "/dev/tty"
DOWNLOAD = """fused_moe is compiled against PyTorch, and none was found: one is fetched for the compilation.
PyPI's is the CUDA build, 2.7 GB with its libraries. To choose another, first install it, setuptools and
ninja, then pip install --no-build-isolation.
"""
COMPILING = """
fused_moe: compiling. On two cores that takes about a minute, and 10 to 15 more where there is an nvcc.
"""


def tell(text: str) -> None:
    """pip shows what a backend prints only when it fails, or with -v."""
    try:
        with open(TERMINAL, "w") as terminal:
            terminal.write(text)
    except OSError:
        sys.stderr.write(text)


def torch_to_ask_for() -> list[str]:
    setup = runpy.run_path("setup.py")
    setup["require_compilers"]()  # before the download
    try:
        setup["find_torch"]()
    except SystemExit:
        pass
    else:
        return []
    tell(DOWNLOAD)
    return ["torch>=2.10"]


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + torch_to_ask_for()


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + torch_to_ask_for()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _show_progress()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _show_progress()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def _show_progress() -> None:
    """setup.py writes ninja's progress there, too."""
    if not sys.stdout.isatty():  # it is pip's
        tell(COMPILING)
        os.environ.setdefault("FUSED_MOE_TERMINAL", TERMINAL)

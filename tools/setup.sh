#!/bin/sh
# tools/setup.sh FOLDER REQUIREMENT...: makes the virtual environment FOLDER with PyTorch in it.
#
# First it checks for what pip cannot install, and lists everything missing with its Debian package.
# If $PYTHON can import a PyTorch that is new enough, the environment uses it; else REQUIREMENT is installed.
set -eu
venv=$1
shift
python=${PYTHON:-python3}
missing=

# require PACKAGE WHAT COMMAND...: records that WHAT is missing if COMMAND fails.
require() {
    package=$1 what=$2
    shift 2
    if ! "$@" >/dev/null 2>&1; then
        echo "fused_moe: missing: $what (Debian package: $package)" >&2
        missing="$missing $package"
    fi
}
compilers() {
    echo '#include <math.h>' | ${CC:-cc} -std=gnu11 -fsyntax-only -x c - &&
        echo '#include <concepts>' | ${CXX:-c++} -std=c++20 -fsyntax-only -x c++ -
}

if "$python" --version >/dev/null 2>&1; then
    require python3 "Python 3.10 or newer ($("$python" --version))" \
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'
    require python3-venv "Python's venv and ensurepip modules" "$python" -c 'import ensurepip, venv'
    require python3-dev "Python's C headers" \
        "$python" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")'
else
    require "python3 python3-venv python3-dev" "$python" false
fi
require g++ "a C and a C++20 compiler (${CC:-cc}, ${CXX:-c++})" compilers
if [ -n "$missing" ]; then
    echo "fused_moe: on Debian and Ubuntu: sudo apt install$missing" >&2
    exit 1
fi

has_torch() {
    "$1" -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)' 2>/dev/null
}
# A new virtual environment can use the packages of $PYTHON, unless that is a virtual environment itself.
if "$python" -c 'import sys; assert sys.prefix == sys.base_prefix' 2>/dev/null && has_torch "$python"; then
    site=--system-site-packages
else
    site=
fi
[ -x "$venv/bin/pip" ] || "$python" -m venv $site "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
if ! has_torch "$venv/bin/python"; then
    if [ ! -e /proc/driver/nvidia ]; then
        echo "fused_moe: no NVIDIA GPU here: PyTorch's CPU build suffices and is far smaller. To use it,"
        echo "install it first, or add its index: make TORCH='$* --index-url ...' (see pytorch.org)"
    fi
    $pip install "$@"
fi
# A new virtual environment has an old setuptools, or none.
$pip install --quiet 'setuptools>=77' 'ninja>=1.11' 'pybind11>=2.11'

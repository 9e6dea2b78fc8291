#!/bin/sh
# tools/setup.sh FOLDER EXTRAS: makes FOLDER a virtual environment that has PyTorch, this checkout and what its
# EXTRAS (of pyproject.toml) need. It does nothing where it has done so before.
#
# First it checks for what pip cannot install, and lists everything missing with its Debian package. A PyTorch in
# FOLDER that is new enough is used. A new FOLDER is made by $PYTHON, whose packages it can use if PyTorch is among
# them. Else $TORCH is installed: from $CPU_INDEX on a machine without an NVIDIA driver, if that is not empty.
set -euf
venv=$1 extras=$2

# Another checkout that uses FOLDER takes the name fused_moe there, and this one has to take it back.
installed=$venv/fused_moe-$extras
if [ -x "$venv/bin/python" ] && [ "$(cat "$installed" 2>/dev/null)" = "$PWD" ] &&
    [ ! pyproject.toml -nt "$installed" ] && [ ! tools/setup.sh -nt "$installed" ]; then
    exit
fi

say() { echo "fused_moe: $*"; }
fail() {
    say "$@" >&2
    exit 1
}
# run COMMAND...: shows it, as it could be pasted into a shell, and runs it.
run() {
    line=
    for word; do
        case $word in *[!A-Za-z0-9_./:=,+-]*) word="'$word'" ;; esac
        line="$line $word"
    done
    echo "\$$line"
    "$@"
}

if [ -L "$venv/bin/python" ] && [ ! -e "$venv/bin/python" ]; then
    fail "the Python of $venv is gone: remove that folder, or name another by VENV="
elif [ -x "$venv/bin/python" ]; then
    python=$venv/bin/python
else
    python=${PYTHON:-python3}
fi

missing=
# require PACKAGE WHAT COMMAND...: records that WHAT is missing if COMMAND fails.
require() {
    package=$1 what=$2
    shift 2
    if ! "$@" >/dev/null 2>&1; then
        say "missing: $what (Debian package: $package)" >&2
        missing="$missing $package"
    fi
}
can_install() {
    "$venv/bin/python" -m pip --version || "$python" -c 'import ensurepip, venv'
}
compilers() {
    echo '#include <math.h>' | ${CC:-cc} -std=gnu11 -fsyntax-only -x c - &&
        echo '#include <concepts>' | ${CXX:-c++} -std=c++20 -fsyntax-only -x c++ -
}

if "$python" --version >/dev/null 2>&1; then
    require python3 "Python 3.10 or newer ($("$python" --version))" \
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'
    require python3-venv "Python's venv and ensurepip modules" can_install
    require python3-dev "Python's C headers" \
        "$python" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")'
else
    require "python3 python3-venv python3-dev" "$python" false
fi
require g++ "a C and a C++20 compiler (${CC:-cc}, ${CXX:-c++})" compilers
[ -z "$missing" ] || fail "on Debian and Ubuntu: sudo apt install$missing"

# torch_of PYTHON: the version of its PyTorch, or nothing.
torch_of() {
    "$1" -c 'import torch; print(torch.__version__)' 2>/dev/null || true
}
new_enough() {
    case $1 in [01].* | 2.[0-9] | 2.[0-9].*) return 1 ;; *) [ -n "$1" ] ;; esac
}

if [ ! -x "$venv/bin/python" ]; then
    site=
    # $PYTHON can be a conda environment's, but a virtual environment does not lend its packages.
    if "$python" -c 'import sys; assert sys.prefix == sys.base_prefix' 2>/dev/null &&
        new_enough "$(torch_of "$python")"; then
        site=--system-site-packages
    fi
    run "$python" -m venv $site "$venv"
fi
python=$venv/bin/python
# An environment of uv has no pip.
"$python" -m pip --version >/dev/null 2>&1 || run "$python" -m ensurepip
pip() { run "$python" -m pip --disable-pip-version-check "$@"; }

# from_own_index: installs $TORCH from the index that pip is set to.
from_own_index() {
    pip install $TORCH || fail "PyTorch was not installed (see above). An environment that has it: make VENV=FOLDER"
}

torch=$(torch_of "$python")
if [ -z "$torch" ]; then
    cuda="PyTorch's CUDA build is about 2.7 GB to download (4 minutes at 10 MB/s) and 5 GB on disk"
    if [ -e /proc/driver/nvidia ] || command -v nvidia-smi >/dev/null || [ -z "${CPU_INDEX-}" ]; then
        say "$cuda, if that is what pip's index has."
        from_own_index
    else
        say "no NVIDIA driver here. PyTorch's CPU build is about 200 MB to download (20 seconds at 10 MB/s)"
        say "and 0.7 GB on disk."
        if ! pip install --retries 1 --index-url "$CPU_INDEX" $TORCH; then
            say "$CPU_INDEX cannot be used (see above)."
            # A folder of wheels that pip is set to (find-links) needs no download; an index may have newer ones.
            if pip install --quiet --no-index --no-deps $TORCH 2>/dev/null; then
                say "using the PyTorch of a folder that pip is set to."
            else
                say "installing from pip's own index instead."
                say "$cuda. Interrupt, and set CPU_INDEX= to a mirror, to avoid that."
            fi
            from_own_index
        fi
    fi
    torch=$(torch_of "$python")
fi
[ -n "$torch" ] || "$python" -c 'import torch' # ends here, and shows why
new_enough "$torch" || fail "expected PyTorch >= 2.10 in $venv, found $torch." \
    "Upgrade it, or make an environment of fused_moe's own: make VENV=.venv"
say "using PyTorch $torch of $venv, and installing what fused_moe needs beside it"
# A new virtual environment has an old setuptools, or none; editable installs came with pip 21.3.
pip install --quiet 'pip>=21.3' 'setuptools>=77' 'ninja>=1.11' 'pybind11>=2.11'
# What the extras need comes before compiling: an index that lacks it is found in a minute, not in twenty.
needed=$("$python" -c '
import sys
from setuptools.config.pyprojecttoml import read_configuration
extras = read_configuration("pyproject.toml", expand=False)["project"]["optional-dependencies"]
print(*(package for extra in sys.argv[1].split(",") for package in extras[extra]))' "$extras")
pip install --quiet $needed
# pip would compile, too, but without showing progress. ninja must not ask the jobserver of `make -j`.
unset MAKEFLAGS
say "compiling: on two cores about a minute for the CPU tier, and 10 to 15 more for the GPU tiers where there is an nvcc"
run "$python" setup.py --quiet build_ext --inplace
pip install --quiet --no-build-isolation --editable ".[$extras]"
echo "$PWD" >"$installed"

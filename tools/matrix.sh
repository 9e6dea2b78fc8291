#!/bin/bash
# One wheel on every Python and every PyTorch: the quick tests of the CPU tier, and a table of what ran.
#
#   tools/matrix.sh [--wheel FILE] [--torch "2.10 2.11 ..."] [--torch-of-pythons X.Y] [--python X.Y] [--out FILE]
#
# Every Python from 3.10 on that is found on PATH or in pyenv runs one PyTorch (--torch-of-pythons), and every
# PyTorch of --torch runs on one Python (--python). An empty value leaves that half out. Without --wheel, one is
# made by `make wheel`. The table, in Markdown, is written to --out after each row. Each combination has an
# environment of its own, 2 GB, which is removed after use.
#
# pip's PyTorch for Linux is the CUDA build. It is installed without CUDA's libraries, 3 GB, and where the machine
# lacks them tools/stub_cuda.py puts stubs in their place. Exits with 1 when a combination failed.
set -uo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")

wheel='' out=$root/benchmarks/results/matrix.md
torches="2.10 2.11 2.12 2.13 2.14 2.15" torch_of_pythons=2.13 python_of_torches=3.11
while [ $# -gt 0 ]; do
    case $1 in
    --wheel) wheel=$(realpath "$2") ;;
    --torch) torches=$2 ;;
    --torch-of-pythons) torch_of_pythons=$2 ;;
    --python) python_of_torches=$2 ;;
    --out) out=$(realpath -m "$2") ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" && exit 2 ;;
    esac
    shift 2 || exit 2
done

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PIP_NO_CACHE_DIR=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "$wheel" ]; then
    make -C "$root" wheel || exit
    wheel=$(echo "$root"/dist/*.whl)
fi
commit=${COMMIT:-$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)}
cp -r "$root/tests" "$root/pyproject.toml" "$work" # so that nothing of the checkout is imported

# "3.X PATH" for each minor version, the first that runs. pyenv's shims fail for versions that are not selected.
pythons() {
    local minor
    for minor in {10..19}; do
        { type -ap "python3.$minor"; ls "$(pyenv root)/versions/3.$minor".*/bin/python; } 2>/dev/null |
            while read -r path; do
                "$path" -c 'import ensurepip, sys, venv; print("3.%d" % sys.version_info[1], sys.executable)' 2>/dev/null
            done | head -1
    done
}

# Installs into $work/venv, each step's messages in $work/log.
install() { # install PYTHON TORCH
    local pip="$work/venv/bin/python -m pip install --quiet"
    "$1" -m venv "$work/venv" &&
        $pip --no-deps "torch==$2.*" &&
        "$work/venv/bin/python" -c '
from importlib.metadata import requires
import re
cuda = re.compile("nvidia|cuda|triton")
print(*(r for r in requires("torch") if "extra ==" not in r and not cuda.match(r)), sep="\n")' >"$work/requirements" &&
        $pip -r "$work/requirements" "pytest>=7" "hypothesis>=6" numpy tqdm &&
        $pip --no-deps "$wheel" &&
        "$work/venv/bin/python" "$root/tools/stub_cuda.py" "$work"/venv/lib/python3*/site-packages/torch/lib
}

facts() {
    "$work/venv/bin/python" -c 'import platform, torch; print(torch.__version__, platform.python_version())'
}

quick_tests() (
    cd "$work" && venv/bin/python -m pytest -m quick -q -p no:cacheprovider
)

rows=() failed=0
try() { # try VERSION PYTHON TORCH
    local torch=$3 python=$1 result seconds=$SECONDS
    echo "=== Python $python, PyTorch $torch"
    rm -rf "$work/venv"
    if ! install "$2" "$3" >"$work/log" 2>&1; then
        result="not installed: $(grep -m1 -E 'ERROR|Error' "$work/log" | tr -d '|"\\' | cut -c1-100)"
    elif ! read -r torch python < <(facts 2>"$work/log"); then
        torch=$3 python=$1 result="PyTorch cannot be imported: $(tail -1 "$work/log" | tr -d '|"\\' | cut -c1-100)"
    else
        quick_tests >"$work/log" 2>&1
        case $? in 0) result=passed ;; *) result=FAILED ;; esac
        result+=": $(tail -1 "$work/log" | sed -E 's/^=+ | =+$//g; s/ in [0-9].*//')"
    fi
    if [[ $result != passed* ]]; then
        failed=1
        tail -40 "$work/log"
    fi
    rows+=("$torch|$python|$result|$((SECONDS - seconds))")
    echo "=== $result"
    write_table
}

write_table() {
    {
        echo "# One wheel, many Pythons and PyTorches"
        echo
        echo "\`pytest -m quick\` on the CPU tier, by \`tools/matrix.sh\`. $(date -u +%Y-%m-%d), commit $commit, $(basename "$wheel"), $(nproc) cores."
        echo
        echo "| PyTorch | Python | result | seconds |"
        echo "|---|---|---|---|"
        for row in "${rows[@]}"; do echo "| ${row//|/ | } |"; done
    } >"$out"
}

found=$(pythons)
echo "found:" $found
while read -r version path; do
    [ -z "$torch_of_pythons" ] || try "$version" "$path" "$torch_of_pythons"
done <<<"$found"
path=$(sed -n "s/^$python_of_torches //p" <<<"$found")
if [ -n "$torches" ] && [ -z "$path" ]; then
    echo "expected Python $python_of_torches on PATH or in pyenv, or --python with one that is there"
    exit 2
fi
for torch in $torches; do
    [ "$torch" = "$torch_of_pythons" ] || try "$python_of_torches" "$path" "$torch"
done
cat "$out"
exit $failed

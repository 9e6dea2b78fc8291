"""The workflow that publishes, its shell steps and .ci/run's functions; pinned actions; the conda recipe."""

import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
if not WORKFLOWS:
    pytest.skip("needs .github beside tests/", allow_module_level=True)

RELEASE = (ROOT / ".github/workflows/release.yml").read_text()
VERSION = re.search(r'__version__ = "(.*)"', (ROOT / "fused_moe/version.py").read_text())[1]


def script(name: str) -> str:
    """The commands of the release's step with that name."""
    step = re.search(rf"- name: {name}\n(?:.*\n)*?( +)run: \|\n((?:\1  .*\n|\n)+)", RELEASE)
    return textwrap.dedent(step[2])


def shell(name: str, **env: str) -> subprocess.CompletedProcess:
    command = ["bash", "-e", "-c", script(name)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True)


def test_the_tag_is_the_version():
    assert shell("The tag is the version", GITHUB_REF_NAME=f"v{VERSION}").returncode == 0
    run = shell("The tag is the version", GITHUB_REF_NAME="v9.8.7")
    assert run.returncode == 1
    assert f"expected the tag v{VERSION}" in run.stdout and "found v9.8.7" in run.stdout


def test_the_notes_are_the_newest_section(tmp_path):
    awk = next(
        line for line in script("The changelog's newest section as the notes").splitlines() if "awk" in line
    )
    subprocess.run(["bash", "-c", awk.replace("notes.md", f"{tmp_path}/notes.md")], cwd=ROOT, check=True)
    notes = (tmp_path / "notes.md").read_text().strip()
    sections = re.split(r"^## .*\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert notes == sections[1].strip()


def test_the_wheel_is_checked_by_functions_of_ci():
    called = re.findall(r'^(?:step ".*" )?([a-z]+_[a-z]+|overlay)\b', script("Wheel"), re.M)
    assert {"build_wheel", "check_cuda", "overlay", "install_wheel", "check_symbols", "test_wheel"} == {
        *called
    }
    for name in called:
        run = subprocess.run(["bash", "-c", f"source .ci/run; declare -F {name}"], cwd=ROOT)
        assert run.returncode == 0, name


def sourced(commands: str) -> subprocess.CompletedProcess:
    """The commands among the functions of .ci/run. Waits for every process that has their output."""
    command = ["bash", "-c", f"source .ci/run\n{commands}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_wheel_is_of_the_machine():
    run = sourced("uname() { echo some_arch; }; make() { :; }; build_wheel")
    assert run.returncode == 1
    assert f"expected dist/fused_moe-{VERSION}-py3-none-manylinux_2_28_some_arch.whl, found" in run.stdout


def test_a_step_that_fails_ends_the_downloads():
    """With their own processes, which would write into a folder that is gone."""
    run = sourced("""
        exec 3>&2
        queue() { :; }
        overlay() { :; }
        environments() { touch "$work/started" && sleep 600 2>&3; }
        make() {
            until [ -e "$work/started" ]; do sleep 0.1; done
            echo "work: $work"
            return 1
        }
        run""")
    assert run.returncode == 1 and "build, warnings are errors" in run.stdout
    assert not Path(re.search("^work: (.*)", run.stdout, re.M)[1]).exists()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_forks_run_on_hosted_machines(workflow):
    """A job that a pull request may start runs on the variable RUNNER's machine only for branches of the
    repository."""
    text = workflow.read_text()
    assert "pull_request_target" not in text and "workflow_run" not in text
    jobs = re.split(r"^  (?=[\w-]+:$)", text.partition("\njobs:\n")[2], flags=re.M)[1:]
    assert jobs
    of_pull_requests = [
        job
        for job in jobs
        if re.search(r"^  pull_request:", text, re.M) and "if: github.event_name != 'pull_request'" not in job
    ]
    for job in of_pull_requests:
        machine = re.search(r"^    runs-on: (.*)$", job, re.M)[1]
        if not re.fullmatch(r"ubuntu-[\d.]+", machine):
            same = "github.event.pull_request.head.repo.full_name == github.repository"
            assert machine == f"${{{{ {same} && vars.RUNNER || 'ubuntu-22.04' }}}}"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(workflow):
    """With the release beside it, the same in each workflow."""
    uses = re.findall(r"uses: (\S+)(.*)", workflow.read_text())
    assert uses
    for action, comment in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
        name = action.split("@")[0]
        for other in WORKFLOWS:
            assert set(re.findall(rf"{name}@.*", other.read_text())) <= {action + comment}


def test_the_recipe_is_of_this_version():
    recipe = (ROOT / "recipe/recipe.yaml").read_text()
    assert re.search(r"^  version: (\S+)$", recipe, re.M)[1] == VERSION
    project = (ROOT / "pyproject.toml").read_text()
    for package in re.findall(r'requires = \["(\w+)>=([\d.]+)", "(\w+)>=([\d.]+)"\]', project)[0][::2]:
        least = re.search(rf'"{package}>=([\d.]+)"', project)[1]
        assert f"- {package} >={least}\n" in recipe
    assert re.search(r'dependencies = \["torch>=([\d.]+)"\]', project)[1] == "2.10"
    assert recipe.count("pytorch >=2.10") == 4


def test_the_recipe_renders():
    """Two packages: for CPUs, and for CUDA with a higher number. Nothing is fetched."""
    rattler_build = pytest.importorskip("rattler_build", reason="needs py-rattler-build")
    recipe = rattler_build.Stage0Recipe.from_file(ROOT / "recipe/recipe.yaml")
    variants = rattler_build.VariantConfig.from_file(ROOT / "recipe/variants.yaml")
    packages = [variant.recipe.to_dict() for variant in recipe.render(variants)]
    strings = {re.sub("h[0-9a-f]+", "h", p["build"]["string"]): p["build"]["number"] for p in packages}
    assert strings == {"cuda130_h_200": 200, "cpu_h_0": 0}

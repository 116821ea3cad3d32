"""What a wheel takes along: modules do so by themselves, any other file by its ending."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import find_packages

from experiment_core_utils.primitives.files import EMBEDDED_MODEL, REPOSITORY

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS, PROJECT = PYPROJECT["tool"]["setuptools"], PYPROJECT["project"]
PACKAGES = ("experiment_core_utils", "experiments", "knob_profiler")
# Packages that are imported by another name.
PACKAGE_OF = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}


def files_of_packages() -> list[Path]:
    every = [path for top in PACKAGES for path in (REPOSITORY / top).rglob("*") if path.is_file()]
    return [path for path in every if "__pycache__" not in path.parts]


def test_files_that_are_no_modules_are_data_of_their_package() -> None:
    (patterns,) = SETUPTOOLS["package-data"].values()
    data = [path for path in (*files_of_packages(), *EMBEDDED_MODEL.iterdir()) if path.suffix != ".py"]
    assert {"attention.cpp", "vision_block.cpp", "prompts.jsonl", "page.html"} <= {path.name for path in data}
    assert [path.name for path in data if not any(fnmatch(path.name, pattern) for pattern in patterns)] == []


def test_every_folder_with_files_is_a_package() -> None:
    folders = {path.parent for path in files_of_packages()}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def required(name: str) -> set[tuple[str, str]]:
    lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
    return {(found[1], found[2]) for line in lines if (found := re.match(r"([\w-]+)==(\S+)", line))}


def test_the_ranges_contain_the_pinned_versions() -> None:
    extras = PROJECT["optional-dependencies"]
    ranges = [
        Requirement(each) for each in (*PROJECT["dependencies"], *(one for each in extras.values() for one in each))
    ]
    specifiers = {each.name: each.specifier for each in ranges if each.name != PROJECT["name"]}
    pins = dict(required("requirements.txt") | required("requirements-dev.txt"))
    # Of extras that the tests do not need: what uses them is tested where they are installed.
    assert set(specifiers) - set(pins) == {"lmms-eval", "timm", "torchvision"}
    # torch brings triton where it runs on a GPU.
    assert set(pins) - set(specifiers) == {"triton"}
    assert [name for name, pin in pins.items() if name in specifiers and pin not in specifiers[name]] == []


def test_the_embedded_model_is_a_package_of_the_wheel() -> None:
    script = (REPOSITORY / "setup.py").read_text(encoding="utf-8")
    assert f'"{EMBEDDED_MODEL.relative_to(REPOSITORY)}"' in script
    assert "experiment_core_utils.checkpoints.molmoe_tiny" in script
    assert re.findall(r'"(\w+)\*"', script) == list(PACKAGES)


def test_what_is_run_from_a_checkout_is_in_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module of the wheel imports it, but in the branch of an option that a checkout has."""
    monkeypatch.chdir(REPOSITORY)
    script = ast.parse(Path("setup.py").read_text(encoding="utf-8"))
    (call,) = [each.value for each in script.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)]
    packages = find_packages(**{each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg})
    left_out = "benchmarks", "block_importance.from_checkout"
    assert "experiments.block_importance" in packages
    assert [name for name in packages for each in left_out if name.startswith(f"experiments.{each}")] == []
    kept = [path for name in packages for path in Path(name.replace(".", "/")).glob("*.py")]
    names = "|".join(map(re.escape, left_out))
    at_import = re.compile(rf"^(from|import) experiments\.({names})", re.MULTILINE)
    anywhere = re.compile(rf"^\s*(from|import) experiments\.({names})", re.MULTILINE)
    texts = {path.name: path.read_text(encoding="utf-8") for path in kept if path.name != "__init__.py"}
    assert len(kept) > 100 and [name for name, text in texts.items() if at_import.search(text)] == []
    assert [name for name, text in texts.items() if anywhere.search(text)] == ["score_blocks.py"]


def test_the_licences_are_of_the_packages_that_are_required_and_no_others() -> None:
    page = (REPOSITORY / "docs/licences.md").read_text(encoding="utf-8")
    packages = page[page.index("## Packages") : page.index("Of the packages that these bring along")]
    users, developers = packages.split("Named in [requirements-dev.txt]")
    for said, file in ((users, "requirements.txt"), (developers, "requirements-dev.txt")):
        assert sorted(re.findall(r"([\w-]+)\s(\d[\d.]*)\s\(", said)) == sorted(required(file))
    assert "not imported" not in page


def test_the_licences_name_every_package_that_is_imported() -> None:
    page = (REPOSITORY / "docs/licences.md").read_text(encoding="utf-8")
    names = set()
    scripts = list((REPOSITORY / "scripts").rglob("*.py"))
    for path in [each for each in files_of_packages() if each.suffix == ".py"] + scripts:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {each.name.split(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                names.add(node.module.split(".")[0])
    own = {path.name for path in REPOSITORY.iterdir()} | {path.stem for path in scripts} | sys.stdlib_module_names
    packages = {PACKAGE_OF.get(name, name) for name in names - own}
    assert "torch" in packages
    assert sorted(name for name in packages if re.search(rf"\b{name}\b", page) is None) == []


@pytest.mark.skipif(shutil.which("git") is None or not (REPOSITORY / ".git").exists(), reason="not a git checkout")
def test_what_runs_write_is_not_offered_to_git() -> None:
    written = [
        "emissions_0001.csv",
        "energy_0001.json",
        "results/raw_results/0001/energy_0001.json",
        "experiments/core_exp/results/run/vqa_settings.csv",
        "experiments/performance_prediction/results/layers.csv",
        "notebooks/results/table.csv",
        "persistent_progress_trackers/progress.json",
    ]
    found = subprocess.run(
        ["git", "check-ignore", "--no-index", *written], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert found.stdout.splitlines() == written
    kept = subprocess.run(["git", "check-ignore", "--no-index", "results/README.md"], cwd=REPOSITORY)
    assert kept.returncode == 1

"""Names and files, from a checkout and from a wheel."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# At the root, installed under sgl_specflow.
MOVED = ("kernels", "launch", "eval")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PYPROJECT["tool"]["setuptools"]["packages"]


def python(code, cwd):
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def shipped_files(*suffixes):
    """Files in the packages' folders, as names inside the wheel."""
    found = {}
    for folder in ("sgl_specflow", *MOVED):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                name = path.relative_to(ROOT).as_posix()
                found[name if folder == "sgl_specflow" else f"sgl_specflow/{name}"] = path
    return found


def test_root_folders_hold_no_init():
    assert not [path for folder in MOVED for path in (ROOT / folder).glob("__init__.py")]


def test_every_folder_with_modules_is_a_listed_package():
    folders = {Path(name).parent.as_posix().replace("/", ".") for name in shipped_files(".py")}
    assert folders <= set(PACKAGES), f"missing in pyproject.toml: {sorted(folders - set(PACKAGES))}"


def test_kernels_is_the_hub_package_from_the_repository_root():
    (file,) = python("import kernels; print(kernels.__file__)", ROOT)
    assert Path(file).parent.name == "kernels" and not Path(file).is_relative_to(ROOT / "kernels")
    assert "site-packages" in file


@pytest.mark.parametrize("cwd", [ROOT, Path("/"), ROOT / "launch"], ids=["root", "elsewhere", "launch"])
def test_moved_packages_resolve_in_the_installed_checkout(cwd):
    names = [f"sgl_specflow.{name}" for name in (*MOVED, "kernels.tree_attention")]
    lines = python(f"import importlib\nfor name in {names}: print(importlib.import_module(name).__path__[0])", cwd)
    assert [Path(line) for line in lines] == [*(ROOT / name for name in MOVED), ROOT / "kernels" / "tree_attention"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left in the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for folder in ("sgl_specflow", *MOVED):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, source]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_puts_everything_under_one_name(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sgl_specflow"}


def test_the_wheel_holds_every_module_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = shipped_files(".py", ".cu", ".cuh", ".safetensors", ".jsonl", ".json")
    expected = {name for name in expected if not name.startswith("sgl_specflow/eval/results/")}
    assert "sgl_specflow/launch/prompts.jsonl" in expected
    assert expected <= names, f"missing in the wheel: {sorted(expected - names)}"


def test_the_wheel_registers_the_plugin_and_the_platform(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    text = archive.read(name).decode()
    assert "[sglang.srt.plugins]" in text and "[sglang.srt.platforms]" in text
    for group in PYPROJECT["project"]["entry-points"].values():
        for target in group.values():
            module = target.split(":")[0].replace(".", "/") + ".py"
            assert target in text and module in archive.namelist()


def test_moved_packages_resolve_from_the_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import sgl_specflow.launch.server as server, sgl_specflow.eval as e\n"
        "import sgl_specflow.kernels.tree_attention as k\n"
        "print(server.__file__, e.__path__[0], k.__path__[0], sep='\\n')"
    )
    assert all(Path(line).is_relative_to(tmp_path / "sgl_specflow") for line in python(code, "/"))

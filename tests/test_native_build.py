"""The native CPU library as a part of what is installed: with a compiler, without one, and from a source archive."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tierax.pallas_kernels.cpu import build as recipe
from tierax.pallas_kernels.cpu.library import HANDLERS, load

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = f"tierax/pallas_kernels/cpu/{recipe.LIBRARY}"
PROBE = (
    "from tierax.pallas_kernels.cpu.library import library;"
    "from tierax.pallas_kernels import attention; from tierax.pallas_kernels.kernels import *;"
    "shape = AttentionShape(4, 2, 64, 16, 'f32', 'f32');"
    "print(library().isa or library().absence, '|', attention.select(Target('cpu'), shape).name)"
)


def has_compiler() -> bool:
    try:
        return bool(recipe.find_compiler())
    except recipe.BuildError:
        return False


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the project that was never built."""
    ignore = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "*.so"
    )
    shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=ignore)
    return tmp_path / "tree"


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    outside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TIERAX_NATIVE")}
    done = subprocess.run(
        command, cwd=cwd, env=outside | env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(tree: Path, hook: str, **env: str) -> tuple[Path, str]:
    """A wheel or source archive, and what was said meanwhile."""
    out = tree.parent / hook
    out.mkdir(exist_ok=True)
    code = f"import setuptools.build_meta as b; print('built', b.{hook}({str(out)!r}))"
    said = run(sys.executable, "-c", code, cwd=tree, **env)
    name = re.search(r"^built (\S+)$", said, re.MULTILINE)
    assert name is not None
    return out / name[1], said


def probe(wheel: Path, site: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return run(sys.executable, "-c", PROBE, cwd=site, PYTHONPATH=str(site)).strip()


def test_without_a_compiler_the_wheel_is_built_all_the_same(tree: Path) -> None:
    wheel, said = build(tree, "build_wheel", CXX="/bin/false")
    assert "no native CPU kernels, XLA will serve: " in said
    with zipfile.ZipFile(wheel) as archive:
        assert LIBRARY not in archive.namelist()
    answer = probe(wheel, tree.parent / "site")
    assert answer.startswith(f"no {recipe.LIBRARY}: tierax was installed without a C++17 compiler")
    assert answer.endswith("| xla")


def test_left_away_on_purpose_the_wheel_is_for_any_platform(tree: Path) -> None:
    wheel, _ = build(tree, "build_wheel", TIERAX_NATIVE="0")
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_source_archive_to_wheel_to_kernels(tree: Path) -> None:
    archive, _ = build(tree, "build_sdist")
    with tarfile.open(archive) as tar:
        names = tar.getnames()
        tar.extractall(tree.parent / "unpacked", filter="data")
    for source in recipe.SOURCES.glob("*.[ch]*"):
        assert any(name.endswith(f"/pallas_kernels/cpu/{source.name}") for name in names), source.name
    assert not [name for name in names if name.endswith(".so")]
    wheel, _ = build(tree.parent / "unpacked" / archive.name.removesuffix(".tar.gz"), "build_wheel")
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", wheel.name)
    assert probe(wheel, tree.parent / "site").endswith("| native")


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_editable_install_puts_the_library_beside_the_sources(tree: Path) -> None:
    install = (
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        tree.parent / "site",
    )
    run(sys.executable, "-m", "pip", *install, "-e", tree, cwd=tree.parent)
    assert (tree / "pallas_kernels" / "cpu" / recipe.LIBRARY).is_file()
    assert (
        run(sys.executable, "-c", PROBE, cwd=tree.parent, PYTHONPATH=str(tree / "src"))
        .strip()
        .endswith("| native")
    )


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"CXX": "/nowhere/c++"}, r"/nowhere/c\+\+ does not run: No such file"),
        ({"CXX": "/bin/false -x"}, "/bin/false -x .* failed"),
        ({"PATH": "/nowhere", "CXX": ""}, "no C\\+\\+ compiler: install g\\+\\+"),
    ],
)
def test_the_recipe_says_what_it_lacks(
    environment: dict[str, str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(recipe.BuildError, match=complaint):
        recipe.build(tmp_path / "out.so")
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_does_not_load_is_a_reason_not_an_error(tmp_path: Path) -> None:
    broken = tmp_path / recipe.LIBRARY
    broken.write_bytes(b"not a library")
    assert load(broken).absence.startswith(f"{broken.name} cannot be used, install tierax anew: ")
    assert load(tmp_path / "absent.so").absence.startswith("no absent.so: tierax was installed without")


OTHER = """
#include "xla/ffi/api/c_api.h"

extern "C" const char* tierax_isa() { return "plain"; }

#ifdef HANDLERS
static XLA_FFI_Error* answer(XLA_FFI_CallFrame* frame) {
  auto* asked = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start);
  asked->metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  asked->metadata->api_version.minor_version = XLA_FFI_API_MINOR + 1;
  return nullptr;
}
HANDLERS
#endif
"""


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("newer", [False, True], ids=["older", "newer"])
def test_a_library_of_another_time_is_a_reason_not_an_error(newer: bool, tmp_path: Path) -> None:
    """It lacks handlers; or it was built with newer headers than those of the jaxlib that runs, which refuses it."""
    other = tmp_path / "other.so"
    define = "XLA_FFI_Error* {0}(XLA_FFI_CallFrame* frame) {{ return answer(frame); }}"
    handlers = 'extern "C" { ' + " ".join(define.format(name) for name in HANDLERS) + " }"
    source = OTHER.replace("\nHANDLERS\n", f"\n{handlers}\n")
    flags = [
        *(["-DHANDLERS"] if newer else []),
        "-I",
        str(recipe.jaxlib_headers()),
        "-shared",
        "-fPIC",
        "-x",
        "c++",
    ]
    subprocess.run([*recipe.find_compiler(), *flags, "-", "-o", other], input=source, text=True, check=True)
    probe = (
        "import jax, sys; from pathlib import Path; from tierax.pallas_kernels.cpu.library import HANDLERS, load;"
        "print(load(Path(sys.argv[1])).absence); jax.numpy.ones(3).block_until_ready()"
    )
    absence = run(sys.executable, "-c", probe, other, cwd=tmp_path, PYTHONPATH=str(ROOT / "src"))
    assert absence.startswith("other.so cannot be used, install tierax anew: ")
    assert ("incompatible with the framework's API version" if newer else HANDLERS[0]) in absence

"""The native CPU library as part of the build; everything else about the package stands in pyproject.toml.

Without a compiler, or jaxlib's headers, the build says so and goes on: XLA then serves the CPU. TIERAX_NATIVE=0 leaves the
library away on purpose.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path(__file__).resolve().parent / "pallas_kernels" / "cpu"
sys.path.insert(0, str(FOLDER))
from build import LIBRARY, BuildError, build  # noqa: E402

sys.path.remove(str(FOLDER))


class BuildLibrary(build_ext):
    """Compiles by the project's own recipe: it is no Python module, and its sources are compiled several times."""

    def build_extension(self, ext: Extension) -> None:
        try:
            build(Path(self.get_ext_fullpath(ext.name)))
        except BuildError as error:
            raise CompileError(f"no native CPU kernels, XLA will serve: {error}") from error

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], LIBRARY))


class TagWheel(bdist_wheel):
    """The library is of a platform, but of no Python in particular."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return ("py3", "none", platform)


library = Extension("tierax.pallas_kernels.cpu.native", sources=[], optional=True)
wanted = os.environ.get("TIERAX_NATIVE", "1") != "0"
setup(ext_modules=[library] if wanted else [], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TagWheel})

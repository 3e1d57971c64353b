"""Builds the one extension, kvcomm._core, out of csrc/; everything else is in pyproject.toml.

A C compiler is all it needs: CPython's stable ABI is declared in csrc/py/abi.h and NumPy is reached
without its headers, so neither has to be installed. One build (abi3) serves CPython 3.10 on.
Files that need an instruction set ask for it themselves and are chosen at run time; no flag here
ties the build to the machine it is made on.
"""

from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMPILE = [
    "-std=c11",
    "-O3",
    "-ffp-contract=fast",  # the kernels are written to be fused; -std=c11 alone forbids it
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
]


class BuildCore(build_ext):
    """Tells the extension its version, which stands in pyproject.toml only."""

    def build_extension(self, ext: Extension) -> None:
        version = self.distribution.get_version()
        ext.define_macros = [*ext.define_macros, ("KVCOMM_VERSION", f'"{version}"')]
        super().build_extension(ext)


core = Extension(
    "kvcomm._core",
    sources=sorted(
        path
        for folder in ("csrc/py", "csrc/core", "csrc/backend", "csrc/backend/cpu")
        for path in glob(f"{folder}/*.c")
    ),
    depends=[*sorted(glob("csrc/**/*.h", recursive=True)), "pyproject.toml", "setup.py"],
    include_dirs=["csrc/include"],
    extra_compile_args=COMPILE,
    extra_link_args=["-pthread"],
    libraries=["m"],
    py_limited_api=True,
)

setup(
    ext_modules=[core],
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)

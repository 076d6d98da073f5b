"""Builds the package: the stubs are generated first, everything else is in pyproject.toml."""

import pathlib
import sys

import setuptools

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import generate_stubs  # pylint: disable=wrong-import-position

generate_stubs.generate()
setuptools.setup()

"""Builds the package: setuptools, with the stubs of the contract generated first.

In the repository the stubs are generated from proto/. A source distribution carries the generated
modules and no .proto file, so that installing it needs neither protoc nor a package index.
"""

import generate_stubs
from setuptools import build_meta

GRPC_TOOLS = "grpcio-tools>=1.48"


def _compiler():
    """Packages to install before the build: the stub compiler, if it is needed."""
    if generate_stubs.in_repository() and not generate_stubs.system_compiler():
        return [GRPC_TOOLS]
    return []


def get_requires_for_build_sdist(config_settings=None):
    """Hook of PEP 517."""
    return build_meta.get_requires_for_build_sdist(config_settings) + _compiler()


def get_requires_for_build_wheel(config_settings=None):
    """Hook of PEP 517."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _compiler()


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Hook of PEP 517."""
    generate_stubs.generate()  # the metadata list the packages
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_sdist(sdist_directory, config_settings=None):
    """Hook of PEP 517."""
    generate_stubs.generate()
    return build_meta.build_sdist(sdist_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Hook of PEP 517."""
    generate_stubs.generate()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)

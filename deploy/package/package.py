"""Makes what an operator installs, from what Bazel has built: ./dev package calls it.

    package.py image|deb|wheel|hip-image|all [--output build/package] [--binaries .bazel/bin]
               [--number VERSION]

Prints the size and the SHA-256 of every file that it makes.
"""

import argparse
import os
import pathlib
import sys

import apt_repository
import common
import debian
import hip_image
import image
import wheel


def make_debian(output):
    packages = debian.build_all(output)
    apt_repository.build(packages, output / "apt")


KINDS = {"image": image.build, "deb": make_debian, "wheel": wheel.build}
# Made by tests alone: what an operator installs is the Dockerfile's target.
TEST_KINDS = {"hip-image": hip_image.build}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("kind", choices=[*KINDS, *TEST_KINDS, "all"])
    parser.add_argument("--output", type=pathlib.Path, default=common.ROOT / "build/package")
    parser.add_argument("--binaries", type=pathlib.Path, default=common.BINARIES)
    parser.add_argument("--number", default="",
                        help="version of the packages, where the binaries are of another release")
    args = parser.parse_args()
    common.NUMBER = args.number
    common.BINARIES = args.binaries.resolve()
    os.environ["SOURCE_DATE_EPOCH"] = str(common.epoch())
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    try:
        for kind in KINDS if args.kind == "all" else [args.kind]:
            (KINDS | TEST_KINDS)[kind](output)
    except common.PackageError as error:
        sys.exit(f"package: {error}")


if __name__ == "__main__":
    main()

"""Generates the protobuf and gRPC modules of the contract into mla_client/gen/.

The modules are build products: ignored by git, renewed when a .proto file is newer. The system's
protoc with grpc_python_plugin is used where both exist (protobuf-compiler-grpc), else grpcio-tools.
A source distribution has the modules and not the .proto files: there is nothing to do there.
Imports are rewritten to be relative, so the stubs need no top-level package named `mla`.

protoc 3.20 and later write modules that the protobuf runtimes 3.20 to 6.x load: they carry the
serialized descriptor and build their classes from it.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE / "mla_client" / "gen"
PROTO_ROOT = HERE.parent.parent / "proto"  # holds mla/v1


def in_repository():
    """True where the .proto files are; false in a source distribution."""
    return (PROTO_ROOT / "mla" / "v1").is_dir()


def up_to_date(protos):
    """True if every module exists and is newer than its .proto and than this script."""
    newest = max(path.stat().st_mtime for path in [*protos, pathlib.Path(__file__)])
    modules = [TARGET / f"{path.stem}{suffix}" for path in protos
               for suffix in ("_pb2.py", "_pb2_grpc.py")]
    return all(path.exists() and path.stat().st_mtime >= newest for path in modules)


def system_compiler():
    """The command that runs the system's protoc with the gRPC plugin; None where one is missing."""
    protoc, plugin = shutil.which("protoc"), shutil.which("grpc_python_plugin")
    return [protoc, f"--plugin=protoc-gen-grpc_python={plugin}"] if protoc and plugin else None


def compiler():
    """The command that generates."""
    return system_compiler() or [sys.executable, "-m", "grpc_tools.protoc"]


def generate(target=TARGET):
    """Writes all modules into `target`; false if there was nothing to do."""
    if not in_repository():
        if (TARGET / "__init__.py").exists():
            return False
        raise SystemExit(f"generate_stubs: neither {PROTO_ROOT}/mla/v1 nor {TARGET} is there")
    root = PROTO_ROOT
    protos = sorted((root / "mla" / "v1").glob("*.proto"))
    if target == TARGET and up_to_date(protos):
        return False
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [*compiler(), f"-I{root}", f"--python_out={scratch}", f"--grpc_python_out={scratch}",
             *map(str, protos)], check=True)
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(pathlib.Path(scratch, "mla", "v1").glob("*.py")):
            text = re.sub(r"^from mla\.v1 import", "from . import", path.read_text(), flags=re.M)
            (target / path.name).write_text(text)
    (target / "__init__.py").write_text('"""Generated from proto/mla/v1."""\n')
    return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    changed = generate()
    if not args.quiet:
        print(f"{TARGET}: {'generated' if changed else 'up to date'}")


if __name__ == "__main__":
    main()

"""Debian packages: mla-server, mlactl and, by client/c/package, libmla-client."""

import gzip
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile

import common

# A line of mlactl's help: "  set-quota TENANT    bounds of a tenant".
COMMAND = re.compile(r"^  ([a-z][a-z-]*)(?: [A-Z]+)*(?: {2,}|\n {20,})(.+)$", re.M)
HERE = pathlib.Path(__file__).resolve().parent
CONTROL = """Package: {name}
Version: {version}
Architecture: {architecture}
Maintainer: mla-server developers <mla-server@localhost>
Depends: {depends}
{more}Section: {section}
Priority: optional
Installed-Size: {kilobytes}
Description: {summary}
{description}
"""
SERVER = {
    "name": "mla-server", "section": "net", "summary": "MLA attention server",
    "more": "Recommends: mlactl, python3\n", "extra": ["adduser"],
    "description": " Keeps the paged KV cache of models with multi-head latent attention and\n"
                   " computes their attention, over gRPC and shared memory, for model workers\n"
                   " that keep the weights. The HIP runtime of a GPU is opened if it is there."}
MLACTL = {
    "name": "mlactl", "section": "net", "summary": "command line of the MLA attention server",
    "more": "Suggests: python3-matplotlib\n", "extra": [],
    "description": " Inspects, operates and measures an mla-server."}


def add(root, name, source, mode=0o644):
    """Copies the file `source`, or writes the text, to `name` below `root`."""
    target = root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(source, pathlib.Path):
        shutil.copyfile(source, target)
    else:
        target.write_text(source, encoding="utf-8")
    target.chmod(mode)


def add_compressed(root, name, text):
    target = root / (name + ".gz")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(text.encode())
    target.chmod(0o644)


def manual(binary, summary, *words):
    """The man page of a program, or of one of its commands, made from its --help."""
    with tempfile.TemporaryDirectory(prefix="mla-man-") as folder:
        # help2man runs one word, and asks it for --help and --version.
        program = pathlib.Path(folder) / "-".join([binary.name, *words])
        command = " ".join([f"'{binary}'", *words])
        program.write_text('#!/bin/sh\ncase "$1" in --version) exec '
                           f"'{common.BINARIES}/server/mla-server' --version ;; esac\n"
                           f'exec {command} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
        return common.run("help2man", "--no-info", "--section=1", f"--name={summary}",
                          f"--version-string={common.version()}", "--source=mla-server",
                          "--no-discard-stderr", program)


def add_manuals(root, binary):
    """Pages of mlactl and of each of its commands; of the server one."""
    if binary.name == "mla-server":
        add_compressed(root, "usr/share/man/man8/mla-server.8",
                       manual(binary, "MLA attention server").replace(' "1" ', ' "8" ', 1))
        return
    add_compressed(root, "usr/share/man/man1/mlactl.1",
                   manual(binary, "command line of mla-server"))
    listed = common.run(binary, "--help")
    for name, summary in COMMAND.findall(listed):
        add_compressed(root, f"usr/share/man/man1/mlactl-{name}.1", manual(binary, summary, name))


def fill_server(root):
    add(root, "usr/bin/mla-server", common.stripped(common.BINARIES / "server/mla-server",
                                                    root.parent / "mla-server"), 0o755)
    deploy = common.ROOT / "deploy"
    # A server alone, and one for each GPU of a node with its announcement.
    for name in ("mla-server.service", "mla-server@.service", "mla-announce@.service"):
        add(root, f"lib/systemd/system/{name}", deploy / "systemd" / name)
    add(root, "usr/sbin/mla-place-instances", deploy / "systemd/place_instances.py", 0o755)
    add(root, "usr/lib/sysusers.d/mla-server.conf", deploy / "systemd/sysusers.conf")
    add(root, "etc/mla-server/server.yaml", deploy / "config/example.yaml")
    for name in ("alerts.yaml", "rules.yaml", "prometheus.yaml"):
        add(root, f"usr/share/doc/mla-server/prometheus/{name}", deploy / "prometheus" / name)
    for name in ("dashboard.json", "fleet.json"):
        add(root, f"usr/share/doc/mla-server/{name}", deploy / "grafana" / name)
    add_manuals(root, root / "usr/bin/mla-server")
    add(root, "DEBIAN/conffiles", "/etc/mla-server/server.yaml\n")
    for script in ("postinst", "prerm", "postrm"):
        add(root, f"DEBIAN/{script}", HERE / "scripts" / script, 0o755)


def fill_mlactl(root):
    binary = common.stripped(common.BINARIES / "client/mlactl/mlactl", root.parent / "mlactl")
    add(root, "usr/bin/mlactl", binary, 0o755)
    add(root, "usr/bin/mlactl-plot", common.ROOT / "client/mlactl/bench/mlactl_plot.py", 0o755)
    for shell, name in (("bash", "bash-completion/completions/mlactl"),
                        ("zsh", "zsh/vendor-completions/_mlactl"),
                        ("fish", "fish/vendor_completions.d/mlactl.fish")):
        add(root, f"usr/share/{name}", common.run(binary, "completion", shell) + "\n")
    add_manuals(root, root / "usr/bin/mlactl")


def build(about, fill, output):
    """Makes one package; returns its path."""
    with tempfile.TemporaryDirectory(prefix="mla-deb-") as folder:
        root = pathlib.Path(folder) / "root"
        root.mkdir()
        fill(root)
        name = about["name"]
        add(root, f"usr/share/doc/{name}/copyright", common.ROOT / "LICENSE")
        add_compressed(root, f"usr/share/doc/{name}/changelog",
                       (common.ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
        binary = next(path for path in (root / "usr/bin").iterdir())
        depends = ", ".join([common.library_packages(root.parent / "links", binary),
                             *about["extra"]])
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        add(root, "DEBIAN/control", CONTROL.format(
            version=common.version(), architecture=common.architecture(), depends=depends,
            kilobytes=-(-size // 1024), **{key: about[key] for key in
                                           ("name", "section", "summary", "more", "description")}))
        for path in [root, *root.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)
        common.set_times(root, common.epoch())
        package = output / f"{name}_{common.version()}_{common.architecture()}.deb"
        common.run("dpkg-deb", "--root-owner-group", "--build", root, package)
    common.report(package)
    return package


def build_library(output):
    """The package of the C library, which has a builder of its own."""
    spec = importlib.util.spec_from_file_location(
        "build_deb", common.ROOT / "client/c/package/build_deb.py")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    builder.version = common.version  # all packages have one
    package = builder.build(common.BINARIES / "client/c/libmla_client.so", output)
    common.report(package)
    return package


def build_all(output):
    """Makes all three in `output`; returns their paths."""
    os.environ["SOURCE_DATE_EPOCH"] = str(common.epoch())
    return [build(SERVER, fill_server, output), build(MLACTL, fill_mlactl, output),
            build_library(output)]

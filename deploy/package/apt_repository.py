"""A signed apt repository of Debian packages, by reprepro, in a folder for any web server.

The key: $MLA_PACKAGE_KEY, the fingerprint of a secret key of this user's GnuPG. Without it a key is
made that lives for this one call; its public half is in the repository, and what it signs proves no
more than that nothing was changed since.
"""

import os
import pathlib
import shutil
import tempfile

import common

SUITE = "stable"
KEY_NAME = "mla-server packages"
DISTRIBUTIONS = """Origin: mla-server
Label: mla-server
Suite: {suite}
Codename: {suite}
Architectures: {architecture}
Components: main
Description: MLA attention server, its tools and its C library
SignWith: {key}
"""


def passing_key(home):
    """Makes a key in the GnuPG folder `home`; returns its fingerprint."""
    environment = {**os.environ, "GNUPGHOME": str(home)}
    home.mkdir(mode=0o700)
    common.run("gpg", "--batch", "--quiet", "--passphrase", "", "--quick-generate-key", KEY_NAME,
               "ed25519", "sign", "never", env=environment)
    listed = common.run("gpg", "--batch", "--with-colons", "--list-secret-keys", env=environment)
    return next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))


def build(packages, output):
    """Makes the repository of these packages in `output`, which is emptied first; returns it."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="mla-apt-") as folder:
        folder = pathlib.Path(folder)
        environment = dict(os.environ)
        key = os.environ.get("MLA_PACKAGE_KEY", "")
        if not key:
            environment["GNUPGHOME"] = str(folder / "gnupg")
            key = passing_key(folder / "gnupg")
        (folder / "conf").mkdir()
        (folder / "conf/distributions").write_text(DISTRIBUTIONS.format(
            suite=SUITE, architecture=common.architecture(), key=key), encoding="utf-8")
        for package in packages:
            common.run("reprepro", "--confdir", folder / "conf", "--dbdir", folder / "db",
                       "--outdir", output, "--priority", "optional", "includedeb", SUITE, package,
                       env=environment)
        common.run("gpg", "--batch", "--output", output / "mla-server.gpg", "--export", key,
                   env=environment)
        common.run("gpgconf", "--kill", "all", env=environment)
    common.report(output / f"dists/{SUITE}/InRelease")
    return output

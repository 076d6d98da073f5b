"""The shipped files and the documents agree with the code."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def arguments(text, start):
    """The top-level arguments of a call whose opening parenthesis is at `start`."""
    depth, quoted, parts, begin = 0, False, [], start + 1
    for i in range(start, len(text)):
        char = text[i]
        if char == '"' and text[i - 1] != "\\":
            quoted = not quoted
        if quoted:
            continue
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if (char == "," and depth == 1) or depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
        if depth == 0:
            return parts
    return parts


def reasons_of(text):
    """Every reason token that this C++ text can put into an error."""
    found = set()
    for line in re.findall(r"reason(?: = |\()([^;]*);", text):
        found.update(re.findall(r'"([a-z_]+)"', line))
    for call in re.finditer(r"\bRefuseField\(", text):
        parts = arguments(text, call.end() - 1)
        if len(parts) > 3:
            found.update(re.findall(r'^"([a-z_]+)"$', parts[3]))
    return found


class DocumentsTest(unittest.TestCase):
    def test_every_reason_is_explained(self):
        found = set()
        for folder in ("server", "scheduler", "client/cpp"):
            for path in (ROOT / folder).rglob("*.cc"):
                if not path.name.endswith("_test.cc"):
                    found |= reasons_of(path.read_text(encoding="utf-8"))
        self.assertGreater(len(found), 40)
        manual = read("docs/errors.md")
        missing = sorted(reason for reason in found if f"`{reason}`" not in manual)
        self.assertEqual(missing, [])

    def test_every_documented_reason_exists(self):
        sources = "".join(path.read_text(encoding="utf-8")
                          for folder in ("server", "scheduler", "client/cpp")
                          for path in (ROOT / folder).rglob("*")
                          if path.suffix in (".cc", ".h"))
        table = read("docs/errors.md").split("## Reasons")[1]
        rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
        unknown = [reason for row in rows for reason in re.findall(r"`([a-z_]+)`", row)
                   if f'"{reason}"' not in sources]
        self.assertEqual(unknown, [])


class ShippingTest(unittest.TestCase):
    def setUp(self):
        example = read("deploy/config/example.yaml")
        self.drain_s = int(re.search(r"drain_deadline_ms: (\d+)", example).group(1)) / 1000

    def test_container_runs_without_rights(self):
        dockerfile = read("deploy/container/Dockerfile")
        stages = dict(re.findall(r"^FROM \S+ AS ([\w-]+)\n(.*?)(?=^FROM |\Z)", dockerfile,
                                 re.M | re.S))
        self.assertEqual(set(stages), {"build", "cpu", "rocm-runtime", "rocm"})
        self.assertTrue(dockerfile.endswith("\nFROM cpu\n"))
        for name in ("cpu", "rocm"):  # the images: the last user of each counts
            users = re.findall(r"^USER (\d+):(\d+)$", stages[name], re.M)
            self.assertEqual(users[-1], ("65532", "65532"), name)
        self.assertRegex(stages["cpu"], r'HEALTHCHECK .*CMD \["mlactl", "health"\]')
        self.assertIn("STOPSIGNAL SIGTERM", stages["cpu"])
        self.assertNotIn("--insecure", stages["cpu"].replace("--listen", ""))
        # Groups of devices are numbers of the node's: names inside mean other groups.
        self.assertEqual(re.findall(r"--group-add=(?!\$\(stat -c %g )\S+", dockerfile), [])

    def test_packages_are_installed_before_the_sources_are_copied(self):
        dockerfile = read("deploy/container/Dockerfile")
        self.assertLess(dockerfile.index("./dev setup"), dockerfile.index("COPY . ."))

    def test_service_waits_longer_than_the_drain(self):
        unit = read("deploy/systemd/mla-server.service")
        stop = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M).group(1))
        self.assertGreater(stop, self.drain_s)
        for line in ("Type=notify", "WatchdogSec=30", "ExecReload=/bin/kill -HUP $MAINPID",
                     "MemoryMax=90%", "DynamicUser=yes", "NoNewPrivileges=yes",
                     "ProtectSystem=strict",
                     "CapabilityBoundingSet=", "RestartPreventExitStatus=1"):
            self.assertIn(f"\n{line}\n", unit)

    def test_service_lets_workers_of_the_group_in(self):
        unit = read("deploy/systemd/mla-server.service")
        group = re.search(r"^Environment=MLA_SERVER_SOCKET_GROUP=(\S+)$", unit, re.M).group(1)
        groups = re.search(r"^SupplementaryGroups=(.*)$", unit, re.M).group(1).split()
        self.assertIn(group, groups)
        # If the folder is not accessible, only the unit's own user reaches the sockets.
        mode = int(re.search(r"^RuntimeDirectoryMode=(\d+)$", unit, re.M).group(1), 8)
        self.assertEqual(mode & 0o001, 0o001)

    def test_flags_in_shipped_files_exist(self):
        known = set(re.findall(r"`(--[a-z-]+)`", read("docs/configuration.md")))
        known |= {"--config", "--check-config", "--print-config"}
        for path in ("deploy/container/Dockerfile", "deploy/systemd/mla-server.service"):
            for line in read(path).splitlines():
                if "mla-server" in line and not line.startswith(("#", "RUN", "    &&")):
                    for flag in re.findall(r"(--[a-z-]+)", line.split("mla-server", 1)[1]):
                        self.assertIn(flag, known, f"{path}: {line}")

    def test_variables_and_keys_in_shipped_files_exist(self):
        manual = read("docs/configuration.md")
        variables = set(re.findall(r"`(MLA_[A-Z_]+)`", manual + read("client/mlactl/README.md")))
        keys = set(re.findall(r"^### `([a-z_]+\.[a-z_]+)`", manual, re.M))
        sections = "|".join(sorted({key.split(".")[0] for key in keys}))
        # These are files, values of the chart with the names of keys, and a group of keys by
        # tenant.
        others = {"server.yaml", "tls.crt", "tls.key", "tls.enabled", "tenants.quotas"}
        files = [path for path in (ROOT / "deploy").rglob("*")
                 if path.is_file() and path.suffix not in (".py", ".pyc")]
        self.assertGreater(len(files), 15)
        for path in files:
            text = path.read_text(encoding="utf-8")
            self.assertLessEqual(set(re.findall(r"\bMLA_[A-Z][A-Z_]*\b", text)), variables, path)
            named = set(re.findall(rf"(?<![\w./$-])(?:{sections})\.[a-z_]+\b", text))
            self.assertLessEqual(named, keys | others, path)


if __name__ == "__main__":
    unittest.main()

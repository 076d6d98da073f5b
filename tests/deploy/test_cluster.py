"""Shipped files for clusters: systemd units with one server for each GPU, and scaling examples."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import yaml
from mla_client.cluster.operations import command
from mla_client.cluster.operations.lease import KubernetesLease
from mla_client.cluster.operations.quotas import FleetQuotas

ROOT = pathlib.Path(__file__).resolve().parents[2]
SYSTEMD = ROOT / "deploy/systemd"
# The program that `./dev test` built, unless another one is to be tested.
MLACTL = os.environ.get("MLACTL_UNDER_TEST", str(ROOT / ".bazel/bin/client/mlactl/mlactl"))


def directives(name):
    """The directives of a unit, as section, name and value."""
    section, found = "", []
    text = re.sub(r"\\\n\s*", "", (SYSTEMD / name).read_text())
    for line in text.splitlines():
        if line.startswith("["):
            section = line
        elif line and not line.startswith("#"):
            found.append((section, *line.split("=", 1)))
    return found


class UnitsTest(unittest.TestCase):
    def test_the_template_confines_a_server_as_the_unit_of_one_does(self):
        def confinement(name):
            skipped = ("Description", "Environment", "EnvironmentFile", "Wants", "RuntimeDirectory",
                       "StateDirectory")
            return [one for one in directives(name) if one[1] not in skipped]
        self.assertEqual(confinement("mla-server@.service"), confinement("mla-server.service"))

    def test_servers_of_one_node_share_nothing(self):
        values = {name: value for _, name, value in directives("mla-server@.service")}
        for name in ("RuntimeDirectory", "StateDirectory", "EnvironmentFile"):
            self.assertIn("%i", values[name], name)
        environment = [value for _, name, value in directives("mla-server@.service")
                       if name == "Environment"]
        self.assertIn("MLA_GPU_DEVICE=%i", environment)
        self.assertIn("MLA_SERVER_UNIX_PATH=/run/mla-server-%i/mla.sock", environment)

    def test_what_is_announced_is_the_servers_socket(self):
        start = next(value for _, name, value in directives("mla-announce@.service")
                     if name == "ExecStart")
        self.assertIn("--target=unix:/run/mla-server-%i/mla.sock", start)
        found = subprocess.run([MLACTL, "announce", "--help"], check=True, capture_output=True,
                               text=True)
        for option in re.findall(r"--[a-z]+", start):
            self.assertIn(option, found.stdout)


class PlaceTest(unittest.TestCase):
    """place_instances.py on a made-up /sys."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def add(self, number, address, numa, cores, vendor="0x1002"):
        device = self.root / "sys/devices" / address
        device.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("numa_node", str(numa)), ("local_cpulist", cores)):
            (device / name).write_text(text + "\n")
        render = self.root / f"sys/class/drm/renderD{number}"
        render.mkdir(parents=True)
        (render / "device").symlink_to(device)

    def remove(self, number):
        (self.root / f"sys/class/drm/renderD{number}/device").unlink()
        (self.root / f"sys/class/drm/renderD{number}").rmdir()

    def announced(self):
        return sorted(one.name for one in (self.root / "etc/mla-server").glob("announce-*.env"))

    def run_it(self, *arguments):
        return subprocess.run(
            [sys.executable, str(SYSTEMD / "place_instances.py"), f"--root={self.root}",
             "--host=node-1", *arguments], capture_output=True, text=True, check=False)

    def read(self, name):
        return (self.root / "etc" / name).read_text()

    def test_each_gpu_has_addresses_of_its_own_and_its_part_of_its_node(self):
        # The order of PCI addresses is not that of the devices' numbers.
        self.add(129, "0000:05:00.0", 0, "0-7")
        self.add(128, "0000:15:00.0", 0, "0-7")
        self.add(130, "0000:85:00.0", 1, "8-11,16-19")
        self.add(131, "0000:99:00.0", 1, "8-11,16-19", vendor="0x1a03")  # no GPU that computes
        done = self.run_it("--registry=etcd://e/f")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("0000:05:00.0", self.read("mla-server/gpu-0.env"))
        self.assertIn("MLA_SERVER_LISTEN=0.0.0.0:50553", self.read("mla-server/gpu-1.env"))
        self.assertEqual(self.read("mla-server/announce-2.env"),
                         "REGISTRY=etcd://e/f\nADDRESS=node-1:50555\n")
        places = [self.read(f"systemd/system/mla-server@{number}.service.d/place.conf")
                  for number in range(3)]
        self.assertIn("CPUAffinity=0,1,2,3\n", places[0])
        self.assertIn("CPUAffinity=4,5,6,7\n", places[1])
        self.assertIn("CPUAffinity=8,9,10,11,16,17,18,19\n", places[2])
        self.assertIn("NUMAMask=1", places[2])
        self.assertFalse((self.root / "etc/mla-server/gpu-3.env").exists())

    def test_a_node_that_is_not_known_pins_no_memory(self):
        self.add(128, "0000:05:00.0", -1, "0-3")
        self.assertEqual(self.run_it().returncode, 0)
        self.assertNotIn("NUMA", self.read("systemd/system/mla-server@0.service.d/place.conf"))
        self.assertFalse((self.root / "etc/mla-server/announce-0.env").exists())

    def test_without_a_registry_nothing_is_announced_any_more(self):
        self.add(128, "0000:05:00.0", 0, "0-3")
        for arguments, announced in ((("--registry=etcd://e/f",), True), ((), False)):
            self.assertEqual(self.run_it(*arguments).returncode, 0)
            self.assertEqual((self.root / "etc/mla-server/announce-0.env").exists(), announced)

    def test_gpus_that_are_gone_are_not_announced_any_more(self):
        for number in range(3):
            self.add(128 + number, f"0000:{number}5:00.0", 0, "0-7")
        self.assertEqual(self.run_it("--registry=etcd://e/f").returncode, 0)
        self.remove(129)
        self.assertEqual(self.run_it("--registry=etcd://e/f").returncode, 0)
        self.assertEqual(self.announced(), ["announce-0.env", "announce-1.env"])
        self.remove(128)
        self.remove(130)
        self.assertEqual(self.run_it("--registry=etcd://e/f").returncode, 1)
        self.assertEqual(self.announced(), [])

    def test_a_node_without_gpus_is_said(self):
        done = self.run_it()
        self.assertEqual(done.returncode, 1)
        self.assertIn("no GPU", done.stderr)


class QuotasTest(unittest.TestCase):
    def test_the_manifest_has_the_rights_and_words_that_the_command_needs(self):
        found = {item["kind"]: item for item in yaml.safe_load_all(
            (ROOT / "deploy/kubernetes/quotas.yaml").read_text())}
        name = found["ServiceAccount"]["metadata"]["name"]
        pod = found["Deployment"]["spec"]["template"]["spec"]
        self.assertEqual(pod["serviceAccountName"], name)
        self.assertEqual(found["RoleBinding"]["subjects"][0]["name"], name)
        self.assertEqual(found["RoleBinding"]["roleRef"]["name"],
                         found["Role"]["metadata"]["name"])
        container, = pod["containers"]
        self.assertEqual(container["command"][:3], ["python3", "-m", "mla_client.cluster"])
        words = [word.replace("$(NAMESPACE)", "ai") for word in container["command"][3:]]
        args = command.parser().parse_args(words)
        api = mock.Mock()
        api.call.return_value = (404, {})
        KubernetesLease(api, args.lease, "one").held()
        # Each of its calls is one that a rule allows.
        rules = found["Role"]["rules"]
        api.call.return_value = (200, {"metadata": {}, "spec": {"holderIdentity": "one"}})
        KubernetesLease(api, args.lease, "one").held()
        verbs = {"GET": "get", "POST": "create", "PUT": "update"}
        own = args.lease.split("/")[1]
        for call in api.call.call_args_list:
            verb = verbs[call.args[0]]
            allowed = [rule for rule in rules if verb in rule["verbs"]
                       and own in rule.get("resourceNames", [own])
                       and rule["apiGroups"] == [call.args[1].split("/")[2]]]
            self.assertTrue(allowed, call)
        bounds = found["ConfigMap"]["data"][pathlib.Path(args.file).name]
        self.assertTrue(FleetQuotas.from_json(bounds).bounds)


class ScalingTest(unittest.TestCase):
    def test_examples_never_scale_in_and_name_metrics_that_exist(self):
        known = (ROOT / "docs/metrics.md").read_text()
        for name in ("keda.yaml", "hpa.yaml"):
            text = (ROOT / "deploy/kubernetes" / name).read_text()
            spec = yaml.safe_load(text)["spec"]
            behaviour = (spec["advanced"]["horizontalPodAutoscalerConfig"] if "advanced" in spec
                         else spec)["behavior"]
            self.assertEqual(behaviour["scaleDown"], {"selectPolicy": "Disabled"}, name)
            metrics = set(re.findall(r"\bmla_[a-z_]+", text))
            self.assertEqual(metrics, {"mla_kv_usage_ratio", "mla_oldest_waiting_seconds"}, name)
            for metric in metrics:
                self.assertIn(f"`{metric}`", known)


if __name__ == "__main__":
    unittest.main()

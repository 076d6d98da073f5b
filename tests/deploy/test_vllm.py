"""The examples that put vLLM in front of the server use options that the adapter and its client
accept."""

import inspect
import json
import pathlib
import sys
import unittest

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client" / "python"))

# pylint: disable=wrong-import-position
import mla_client
from mla_client.serving import Options
from mla_client.vllm import plugin


class Examples(unittest.TestCase):
    def check(self, arguments):
        self.assertIn("--attention-backend=CUSTOM", arguments)
        given = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
        self.assertEqual((given["kv_connector"], given["kv_role"]), (plugin.CONNECTOR, "kv_both"))
        options = Options.of(given["kv_connector_extra_config"], "m", "c")
        known = inspect.signature(mla_client.Client.connect).parameters
        self.assertEqual(set(options.arguments) - set(known), set())
        return options

    def read(self, name):
        return yaml.safe_load((ROOT / "deploy" / "vllm" / name).read_text(encoding="utf-8"))

    def test_compose(self):
        services = self.read("compose.yaml")["services"]
        options = self.check(services["vllm"]["command"])
        folder, _, name = options.targets[0].removeprefix("unix:").rpartition("/")
        dockerfile = (ROOT / "deploy/container/Dockerfile").read_text(encoding="utf-8")
        self.assertIn(f"MLA_SERVER_UNIX_PATH={folder}/{name}", dockerfile)
        self.assertIn(f"USER {options.arguments['server_uid']}:", dockerfile)
        for service in ("vllm", "mla-server"):
            self.assertIn(f"mla:{folder}", services[service]["volumes"])

    def test_kubernetes(self):
        pod = self.read("kubernetes.yaml")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        options = self.check(container["args"])
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        for path in options.arguments["tls"].values():
            self.assertIn(str(pathlib.Path(path).parent), mounts)
        self.assertEqual({mount["name"] for mount in container["volumeMounts"]},
                         {volume["name"] for volume in pod["volumes"]})


if __name__ == "__main__":
    unittest.main()

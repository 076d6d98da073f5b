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

    def check_events(self, arguments):
        """Events are published in blocks of one size; returns it, and where they are published."""
        options = self.check(arguments)
        events = json.loads(arguments[arguments.index("--kv-events-config") + 1])
        self.assertEqual((events["enable_kv_cache_events"], events["publisher"]), (True, "zmq"))
        self.assertIn(f"--block-size={options.page_size}", arguments)
        return options.page_size, events

    def test_llm_d(self):
        text = (ROOT / "deploy/vllm/llm-d.yaml").read_text(encoding="utf-8")
        config, deployment, service = yaml.safe_load_all(text)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        size, events = self.check_events(container["args"])
        picker = yaml.safe_load(config["data"]["plugins.yaml"])
        plugins = {one["type"]: one.get("parameters", {}) for one in picker["plugins"]}
        for profile in picker["schedulingProfiles"]:
            for one in profile["plugins"]:
                self.assertIn(one["pluginRef"], plugins)
        producer = plugins["precise-prefix-cache-producer"]
        self.assertEqual(producer["tokenProcessorConfig"]["blockSize"], size)
        port = producer["kvEventsConfig"]["podDiscoveryConfig"]["socketPort"]
        self.assertEqual(events["endpoint"], f"tcp://*:{port}")
        self.assertIn(port, [one["containerPort"] for one in container["ports"]])
        self.assertTrue(events["topic"].startswith(producer["kvEventsConfig"]["topicFilter"]))
        url = plugins["token-producer"]["vllm"]["url"]
        self.assertEqual(url, f"http://{service['metadata']['name']}:"
                              f"{service['spec']['ports'][0]['port']}")
        self.assertIn(f"--model={plugins['token-producer']['modelName']}", container["args"])
        self.assertEqual(service["spec"]["selector"].items()
                         & deployment["spec"]["template"]["metadata"]["labels"].items(),
                         service["spec"]["selector"].items())

    def test_dynamo(self):
        services = self.read("dynamo.yaml")["spec"]["services"]
        frontend, worker = (services[name]["extraPodSpec"]["mainContainer"]["args"]
                            for name in ("Frontend", "Worker"))
        size, _ = self.check_events(worker)
        self.assertEqual(frontend[frontend.index("--kv-cache-block-size") + 1], str(size))


if __name__ == "__main__":
    unittest.main()

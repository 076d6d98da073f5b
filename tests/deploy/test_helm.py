"""The chart: its values, the objects that they render to, and whether the server would accept their
configuration."""

import importlib.util
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import chart
import jsonschema
import test_prometheus
import yaml

ROOT = chart.ROOT
# The build that ./dev test made, unless another one is named.
SERVER = os.environ.get("SERVER_UNDER_TEST", str(ROOT / ".bazel/bin/server/mla-server"))


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def example():
    return yaml.safe_load(read("deploy/config/example.yaml"))


def leaves(values, path=""):
    """The paths of all values that are not mappings, or are empty ones."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key


class SchemaTest(unittest.TestCase):
    def test_schema_and_values_have_the_same_keys(self):
        def compare(values, schema, path):
            if schema.get("additionalProperties") is not False or path == "config.":
                return
            self.assertEqual(set(values), set(schema["properties"]) - {"global"}, path)
            self.assertEqual(set(values), set(schema["required"]), path)
            for key, value in values.items():
                compare(value, schema["properties"][key], f"{path}{key}.")

        compare(chart.load("values.yaml"), chart.schema(), "")

    def test_configuration_keys_are_the_servers(self):
        spec = importlib.util.spec_from_file_location(
            "update_schema", ROOT / "deploy/helm/update_schema.py")
        update_schema = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(update_schema)
        offered = chart.schema()["properties"]["config"]
        self.assertEqual(offered, update_schema.config_schema(),
                         "run deploy/helm/update_schema.py")
        keys = {f"{section}.{key}" for section, values in example().items() for key in values}
        self.assertEqual({f"{section}.{key}" for section, rule in offered["properties"].items()
                          for key in rule["properties"]}, keys - update_schema.OWN_KEYS)
        self.assertLessEqual(update_schema.OWN_KEYS, keys)

    def test_wrong_values_are_refused(self):
        for values in ({"replica": 2}, {"replicas": "two"}, {"service": {"grpcPort": 80}},
                       {"config": {"kv_cache": {"size": "1GiB"}}},
                       {"config": {"kv_cache": {"bytes": "1GB"}}},
                       {"config": {"server": {"listen": "0.0.0.0:1"}}},
                       {"config": {"tls": {"cert": "x"}}},
                       {"config": {"limits": {"decode_rows": 257}}},
                       {"config": {"server": {"drain_deadline_ms": None}}},
                       {"rdma": {"resource": "hca"}}, {"rdma": {"hugepages": "1GB"}},
                       {"sameHost": {"hostPath": "run"}}, {"gpu": {"resource": "gpu"}},
                       {"checkpoints": {"size": "100GB"}}, {"handOver": {"seconds": 0}},
                       {"service": {"bindAddress": "localhost"}}, {"extraEnv": {"a": "b"}},
                       {"config": {"checkpoint": {"path": "/x"}}}):
            with self.assertRaises(jsonschema.ValidationError, msg=values):
                chart.Rendered(values)


class TemplatesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rendered = {name: chart.Rendered(over) for name, over in chart.SCENARIOS.items()}

    def test_every_value_has_an_effect(self):
        touched = chart.values_read()
        unused = [path for path in leaves(chart.load("values.yaml"))
                  if not any(path == read or path.startswith(read + ".") for read in touched)]
        self.assertEqual(unused, [])

    def test_servers_nobody_could_reach_are_refused(self):
        for values in ({"tls": {"enabled": False}}, {"tls": {"secretName": ""}}):
            with self.assertRaises(chart.TemplateError):
                chart.Rendered(values)

    def test_names_follow_the_release(self):
        for release, over, name in (("demo", {}, "demo-mla-server"),
                                    ("my-mla-server", {}, "my-mla-server"),
                                    ("demo", {"fullnameOverride": "a" * 60}, "a" * 52)):
            self.assertIn(("StatefulSet", name), chart.Rendered(over, release).objects)

    def test_parts_refer_to_each_other(self):
        for name, item in self.rendered.items():
            with self.subTest(name):
                stateful, service = item.one("StatefulSet"), item.one("Service")
                labels = stateful["spec"]["template"]["metadata"]["labels"]
                selectors = [stateful["spec"]["selector"]["matchLabels"],
                             service["spec"]["selector"],
                             item.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"]]
                if item.values["podDisruptionBudget"]["enabled"]:
                    selectors.append(
                        item.one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"])
                for selector in selectors:
                    self.assertLessEqual(set(selector.items()), set(labels.items()))
                    self.assertTrue(selector)
                self.assertEqual(stateful["spec"]["serviceName"], service["metadata"]["name"])
                self.assertEqual(service["spec"]["clusterIP"], "None")
                container = item.container()
                ports = {port["name"]: port["containerPort"] for port in container["ports"]}
                self.assertEqual({port["targetPort"]: port["port"]
                                  for port in service["spec"]["ports"]}, ports)
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    self.assertIn(container[probe]["httpGet"]["port"], ports)
                for rule in item.one("NetworkPolicy")["spec"]["ingress"]:
                    self.assertTrue(rule["from"], "no peers: every address is allowed")
                    if rule["from"] == item.values["rdma"]["clients"]:
                        continue  # all ports
                    self.assertLessEqual({port["port"] for port in rule["ports"]}, set(ports))
                self.assertEqual({mount["name"] for mount in container["volumeMounts"]},
                                 {volume["name"] for volume in item.pod()["volumes"]} |
                                 {claim["metadata"]["name"] for claim in
                                  stateful["spec"].get("volumeClaimTemplates", [])})
                created = ("ServiceAccount", item.pod()["serviceAccountName"]) in item.objects
                self.assertEqual(created, item.values["serviceAccount"]["create"])

    def test_a_name_stands_for_the_pods_that_are_ready(self):
        for name, item in self.rendered.items():
            with self.subTest(name):
                service = item.one("Service")
                members = item.objects.get(("Service", service["metadata"]["name"] + "-members"))
                if name == "unix socket only":
                    self.assertIsNone(members)
                    continue
                spec = members["spec"]
                self.assertEqual(spec["clusterIP"], "None")
                self.assertNotIn("publishNotReadyAddresses", spec)
                self.assertEqual(spec["selector"], service["spec"]["selector"])
                # Prometheus looks for the port of operations, and finds each pod once.
                self.assertEqual(spec["ports"], [
                    port for port in service["spec"]["ports"] if port["name"] == "grpc"])
                if item.values["certificate"]["enabled"]:
                    names = item.one("Certificate")["spec"]["dnsNames"]
                    full = members["metadata"]["name"]
                    self.assertIn(full, names)
                    self.assertTrue(any(one.startswith(full + ".") for one in names))
                    self.assertFalse(names[0].startswith(full), "that one is the server's tenant")
                self.assertIn(f"dns:///{members['metadata']['name']}.", item.notes)

    def test_rdma(self):
        item = self.rendered["UCX over RDMA"]
        self.assertEqual(item.environment()["MLA_UCX_ENABLED"], "true")
        limits = item.container()["resources"]["limits"]
        self.assertEqual(limits["rdma/hca_shared_devices_a"], 1)
        self.assertEqual(limits["hugepages-2Mi"], "512Mi")
        capabilities = item.container()["securityContext"]["capabilities"]
        self.assertEqual(capabilities, {"drop": ["ALL"], "add": ["IPC_LOCK"]})
        self.assertTrue(item.pod()["hostNetwork"])
        workers = [{"podSelector": {"matchLabels": {"app": "worker"}}}]
        policy = item.one("NetworkPolicy")["spec"]
        self.assertIn({"from": workers}, policy["ingress"])
        self.assertEqual(policy["egress"], [{"to": workers}])

    def test_without_rdma_nothing_is_opened(self):
        for name, item in self.rendered.items():
            if item.values["rdma"]["clients"]:
                continue
            with self.subTest(name):
                self.assertNotIn("hostNetwork", item.pod())
                self.assertEqual(item.container()["securityContext"]["capabilities"],
                                 {"drop": ["ALL"]})
                for rule in item.one("NetworkPolicy")["spec"]["ingress"]:
                    self.assertIn("ports", rule)
                if not item.values["rdma"]["enabled"]:
                    self.assertNotIn("MLA_UCX_ENABLED", item.environment())

    def test_checkpoints_have_a_volume_for_each_server(self):
        item = self.rendered["everything"]
        (claim,) = item.one("StatefulSet")["spec"]["volumeClaimTemplates"]
        self.assertEqual(claim["spec"]["storageClassName"], "fast")
        self.assertEqual(claim["spec"]["resources"], {"requests": {"storage": "1Ti"}})
        path = {variable["name"]: variable.get("value")
                for variable in item.container()["env"]}["MLA_CHECKPOINT_PATH"]
        (mount,) = [mount for mount in item.container()["volumeMounts"]
                    if mount["name"] == "checkpoints"]
        self.assertTrue(path.startswith(mount["mountPath"] + "/"))
        plain = self.rendered["defaults"].one("StatefulSet")["spec"]
        self.assertNotIn("volumeClaimTemplates", plain)

    def test_pods_run_without_rights(self):
        user = re.search(r"^USER (\d+):(\d+)$", read("deploy/container/Dockerfile"), re.M)
        for item in self.rendered.values():
            pod, container = item.pod(), item.container()
            context = pod["securityContext"]
            self.assertEqual((context["runAsUser"], context["runAsGroup"], context["fsGroup"]),
                             (int(user[1]), int(user[2]), int(user[2])))
            self.assertTrue(context["runAsNonRoot"])
            self.assertEqual(context["seccompProfile"], {"type": "RuntimeDefault"})
            rdma = item.values["rdma"]
            added = {"add": ["IPC_LOCK"]} if rdma["ipcLock"] else {}
            self.assertEqual(container["securityContext"],
                             {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                              "capabilities": {"drop": ["ALL"], **added}})
            self.assertIs(pod["automountServiceAccountToken"], False)
            self.assertEqual("hostNetwork" in pod, rdma["hostNetwork"])
            for mount in container["volumeMounts"]:
                self.assertTrue(mount.get("readOnly") or
                                mount["name"] in ("sockets", "checkpoints", "nvme"), mount)
        volumes = self.rendered["defaults"].pod()["volumes"]
        self.assertFalse([volume for volume in volumes if "hostPath" in volume])

    def test_the_drain_fits_into_the_grace_period(self):
        for item in self.rendered.values():
            grace = item.pod()["terminationGracePeriodSeconds"]
            words = item.container()["lifecycle"]["preStop"]["exec"]["command"]
            self.assertEqual(words[:2], ["mlactl", "drain"])
            options = dict(word.removeprefix("--").split("=", 1) for word in words[2:])
            spent = sum(int(options.get(name, 0)) for name in (
                "delay-ms", "timeout-ms", "linger-ms"))
            drain = item.values["config"]["server"]["drain_deadline_ms"]
            self.assertEqual(options["deadline-ms"], str(drain))
            self.assertGreater(grace * 1000, spent + drain)

    def test_a_pod_that_ends_hands_over_to_the_others(self):
        item = self.rendered["everything"]
        words = item.container()["lifecycle"]["preStop"]["exec"]["command"]
        (peers,) = [word.removeprefix("--to=").split(",") for word in words
                    if word.startswith("--to=")]
        names = item.one("Certificate")["spec"]["dnsNames"]
        self.assertEqual(len(peers), 3)
        self.assertLessEqual({peer.split(":")[0] for peer in peers}, set(names))
        # They may: each is an operator for the others, by the first name of the certificate.
        config = yaml.safe_load(item.one("ConfigMap")["data"]["server.yaml"])
        self.assertEqual(config["server"]["operators"], f"ops,{names[0]}")
        self.assertIn("client auth", item.one("Certificate")["spec"]["usages"])
        # They can: names, addresses and both sides of the policy.
        self.assertIs(item.one("Service")["spec"]["publishNotReadyAddresses"], True)
        policy = item.one("NetworkPolicy")["spec"]
        labels = item.one("StatefulSet")["spec"]["selector"]["matchLabels"]
        self.assertEqual(policy["egress"][0]["to"],
                         [{"podSelector": {"matchLabels": labels}}])
        self.assertEqual({port["port"] for port in policy["egress"][1]["ports"]}, {53})
        self.assertIn([{"podSelector": {"matchLabels": labels}}],
                      [rule["from"] for rule in policy["ingress"]])
        # Alone, or without TLS, there is no server to hand over to, and nothing leaves the pod.
        for name in ("defaults", "no TLS", "unix socket only"):
            alone = self.rendered[name]
            self.assertNotIn("--to=", str(alone.container()["lifecycle"]))
            self.assertEqual(alone.one("NetworkPolicy")["spec"]["egress"], [])

    def test_only_what_needs_a_restart_changes_the_pods(self):
        manual = read("docs/configuration.md")
        live = re.findall(r"^### `([\w.]+)`\n(?:(?!^### ).*\n)*?- a running server takes a new",
                          manual, re.M)
        self.assertGreater(len(live), 20)

        def checksum(config):
            item = chart.Rendered({"config": config})
            return item.one("StatefulSet")["spec"]["template"]["metadata"]["annotations"][
                "checksum/config"]

        before = checksum({})
        values = {"log.level": "debug", "server.operators": "x", "server.plain_operators": "none"}
        for key in live:
            section, name = key.split(".")
            self.assertEqual(checksum({section: {name: values.get(key, 12345)}}), before, key)
        quotas = {"tenants": {"quotas": {"research": {"sequences": 5}}}}
        offered = chart.schema()["properties"]["config"]["properties"]["tenants"]["properties"]
        if "quotas" in offered:
            self.assertEqual(checksum(quotas), before)
        for config in ({"limits": {"max_models": 3}}, {"tenants": {"metrics": 3}},
                       {"kv_cache": {"bytes": "1GiB"}}):
            self.assertNotEqual(checksum(config), before, config)

    def test_the_test_pod_is_no_server(self):
        item = self.rendered["everything"]
        pod = item.one("Pod")
        labels, selector = pod["metadata"]["labels"], item.one("Service")["spec"]["selector"]
        self.assertFalse(set(selector.items()) <= set(labels.items()))
        self.assertEqual(pod["metadata"]["annotations"]["helm.sh/hook"], "test")
        self.assertEqual(pod["spec"]["containers"][0]["command"], ["mlactl", "attend"])
        (target,) = [variable["value"] for variable in pod["spec"]["containers"][0]["env"]
                     if variable["name"] == "MLA_TARGET"]
        self.assertIn(target.split(":")[0], item.one("Certificate")["spec"]["dnsNames"])

    def test_no_library_of_the_node_is_mounted_unless_asked_for(self):
        item = self.rendered["GPU with its runtime in the image, CPU if there is none"]
        self.assertFalse([volume for volume in item.pod()["volumes"] if "hostPath" in volume])
        self.assertIn("WARNING: gpu.supplementalGroups is empty", item.notes)
        self.assertNotIn("WARNING", self.rendered["everything"].notes)

    def test_liveness_outlasts_the_watchdog(self):
        probe = self.rendered["defaults"].container()["livenessProbe"]
        timeout = example()["server"]["unhealthy_after_ms"] / 1000
        self.assertGreater(probe["periodSeconds"] * probe["failureThreshold"], 2 * timeout)
        self.assertEqual(probe["httpGet"]["path"], "/livez")

    def test_cpus_are_requested_and_not_limited(self):
        for name in ("defaults", "everything"):
            resources = self.rendered[name].container()["resources"]
            self.assertIn("cpu", resources["requests"])
            self.assertNotIn("cpu", resources["limits"])

    def test_ports_are_those_of_server_and_image(self):
        service = chart.load("values.yaml")["service"]
        self.assertEqual(service["grpcPort"], int(example()["server"]["listen"].split(":")[1]))
        self.assertEqual(service["opsPort"], int(example()["ops"]["listen"].split(":")[1]))
        exposed = re.findall(r"^EXPOSE (\d+)$", read("deploy/container/Dockerfile"), re.M)
        self.assertEqual(exposed, [str(service["grpcPort"])])

    def test_probes_and_metrics_are_paths_of_the_operations_port(self):
        served = set(re.findall(r'paths\["(/\w+)"\]', read("server/server.cc")))
        item = self.rendered["everything"]
        used = {item.container()[probe]["httpGet"]["path"]
                for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
        used.add(item.one("ServiceMonitor")["spec"]["endpoints"][0]["path"])
        self.assertLessEqual(used, served)
        self.assertEqual(item.one("ServiceMonitor")["spec"]["endpoints"][0]["port"], "ops")

    def test_versions_are_the_servers(self):
        version = re.search(r'kVersion\[\] = "(.*)"', read("base/version/version.h"))[1]
        about = chart.load("Chart.yaml")
        self.assertEqual((about["version"], about["appVersion"]), (version, version))
        self.assertEqual(self.rendered["defaults"].container()["image"], f"mla-server:{version}")

    def test_one_gpu_for_each_server_that_asks(self):
        limits = self.rendered["defaults"].container()["resources"]["limits"]
        self.assertEqual(set(limits), {"memory"})
        item = self.rendered["everything"]
        self.assertEqual(item.container()["resources"]["limits"]["amd.com/gpu"], 1)
        self.assertEqual(item.pod()["securityContext"]["supplementalGroups"], [109, 44])
        self.assertEqual(item.environment()["MLA_BACKEND_NAME"], "hip")
        self.assertEqual(item.one("Service")["metadata"]["labels"]["accelerator"], "gpu")

    def test_monitoring_is_what_the_other_folders_ship(self):
        item = self.rendered["everything"]
        groups = [group for name in ("rules.yaml", "alerts.yaml")
                  for group in test_prometheus.load(test_prometheus.FOLDER / name)["groups"]]
        rendered = item.one("PrometheusRule")["spec"]["groups"]
        for group in rendered:
            for rule in group["rules"]:
                url = rule.get("annotations", {}).get("runbook_url")
                if url is not None:
                    self.assertTrue(url.startswith("https://docs.example/docs/runbook.md#"), url)
                    rule["annotations"]["runbook_url"] = url.removeprefix("https://docs.example/")
        self.assertEqual(rendered, groups)
        boards = item.objects["ConfigMap", "attention-dashboard"]["data"]
        for name, file in (("mla-server.json", "dashboard.json"), ("mla-fleet.json", "fleet.json")):
            self.assertEqual(boards[name].strip(), read(f"deploy/grafana/{file}").strip())
        # The label `job`, as the alerts select it.
        monitor = item.one("ServiceMonitor")["spec"]
        job = item.one("Service")["metadata"]["labels"][monitor["jobLabel"]]
        self.assertRegex(job, "^.*mla-server.*$")
        self.assertIn("accelerator", monitor["targetLabels"])

    def test_notes_name_what_exists(self):
        for item in self.rendered.values():
            name = item.one("StatefulSet")["metadata"]["name"]
            self.assertIn(f"exec {name}-0 -- mlactl", item.notes)
            self.assertEqual("WITHOUT TLS" in item.notes, item.values["insecure"])
            self.assertNotIn("{{", item.notes)


class ServerTest(unittest.TestCase):
    """The server's own check of file and environment, run as a pod would start it."""

    def check(self, item, over=None):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "server.yaml"
            path.write_text(item.one("ConfigMap")["data"]["server.yaml"], encoding="utf-8")
            variables = {name: value for name, value in os.environ.items()
                         if not name.startswith("MLA_")}
            return subprocess.run(
                [SERVER, f"--config={path}", "--print-config"], text=True,
                env={**variables, **item.environment(), **(over or {})}, capture_output=True,
                check=False)

    def test_it_accepts_what_the_chart_renders(self):
        for name, over in chart.SCENARIOS.items():
            item = chart.Rendered(over)
            result = self.check(item)
            self.assertEqual(result.returncode, 0, f"{name}: {result.stdout}{result.stderr}")
            shown = dict(re.findall(r"^(\S+) += (\S*)", result.stdout, re.M))
            service = item.values["service"]
            self.assertEqual(shown["ops.listen"],
                             f"{service['bindAddress']}:{service['opsPort']}")
            self.assertEqual(shown["kv_cache.bytes"], item.values["config"]["kv_cache"]["bytes"])
            self.assertEqual(shown["server.drain_deadline_ms"],
                             str(item.values["config"]["server"]["drain_deadline_ms"]))
            self.assertEqual("server.listen" in shown and bool(shown["server.listen"]),
                             name != "unix socket only")

    def test_variables_of_services_do_not_stop_it(self):
        """Kubernetes sets these variables, which have names of services. Misspelt keys must still
        be refused."""
        item = chart.Rendered({})
        self.assertEqual(self.check(item, {"MLA_SERVER_SERVICE_HOST": "10.0.0.1"}).returncode, 0)
        self.assertEqual(self.check(item, {"MLA_SERVER_NO_SUCH_KEY": "10.0.0.1"}).returncode, 1)
        self.assertIs(item.pod()["enableServiceLinks"], False)

    def test_the_file_lies_where_the_image_looks(self):
        entry = re.search(r'^ENTRYPOINT .*"--config=(.*?)"', read("deploy/container/Dockerfile"),
                          re.M)[1]
        item = chart.Rendered({})
        mount = {mount["name"]: mount["mountPath"] for mount in item.container()["volumeMounts"]}
        self.assertEqual([f"{mount['config']}/{name}" for name in item.one("ConfigMap")["data"]],
                         [entry])
        for variable in ("MLA_TLS_CERT", "MLA_TLS_KEY", "MLA_TLS_CLIENT_CA"):
            self.assertTrue(item.environment()[variable].startswith(mount["tls"] + "/tls.")
                            or item.environment()[variable] == mount["tls"] + "/ca.crt")
        self.assertTrue(item.environment()["MLA_SERVER_UNIX_PATH"].startswith(mount["sockets"]))
        self.assertEqual(item.environment()["MLA_TARGET"],
                         "unix:" + item.environment()["MLA_SERVER_UNIX_PATH"])


if __name__ == "__main__":
    unittest.main()

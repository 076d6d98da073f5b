"""Every configuration key is documented, and nothing else is.

The tables in server/config/ are where keys are declared, except that each resource of a tenant has
its own in scheduler/tenant_table.cc; docs/configuration.md describes them and
deploy/config/example.yaml shows them.
"""

import re
import unittest

import test_tidy

TABLES = ("server/config/config_table.cc", "server/config/config_cache.cc",
          "server/config/config_gpu.cc", "server/config/config_tracing.cc",
          "server/config/config_ucx.cc")
TENANT_TABLE = "scheduler/tenant_table.cc"
REFERENCE = "docs/configuration.md"
EXAMPLE = "deploy/config/example.yaml"


def declared_keys():
    """The dotted names in the rows of the tables."""
    tables = "".join(test_tidy.read(table) for table in TABLES)
    return (re.findall(r'[({]\s*"([a-z_]+\.[a-z_]+)",', tables) +
            re.findall(r'"(tenants\.[a-z_]+)"', test_tidy.read(TENANT_TABLE)))


class ConfigurationTest(unittest.TestCase):
    def test_table_is_read(self):
        keys = declared_keys()
        self.assertGreater(len(keys), 30, keys)
        self.assertEqual(len(keys), len(set(keys)))
        self.assertIn("kv_cache.bytes", keys)

    def test_reference_names_every_key_and_no_other(self):
        documented = set(re.findall(r"^(?:\||###)\s*`([a-z_]+\.[a-z_]+)`",
                                    test_tidy.read(REFERENCE), re.M))
        self.assertEqual(documented, set(declared_keys()))

    def test_example_shows_every_key(self):
        section, shown = "", set()
        for line in test_tidy.read(EXAMPLE).splitlines():
            line = re.sub(r"^#\s?(?=\s*[a-z_]+:)", "", line)
            if match := re.match(r"([a-z_]+):\s*$", line):
                section = match.group(1)
            elif match := re.match(r"\s+([a-z_]+):", line):
                shown.add(f"{section}.{match.group(1)}")
        self.assertEqual(shown, set(declared_keys()))


if __name__ == "__main__":
    unittest.main()

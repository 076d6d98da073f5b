"""The documents become a site, and every link of it resolves."""

import importlib.util
import pathlib
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def builder():
    spec = importlib.util.spec_from_file_location("build_site",
                                                  ROOT / "docs/site/build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SiteTest(unittest.TestCase):
    def test_every_link_resolves(self):
        with tempfile.TemporaryDirectory(prefix="mla-site-") as folder:
            site = pathlib.Path(folder) / "site"
            self.assertEqual(builder().build(site), [])
            self.assertTrue((site / "index.html").is_file())
            self.assertTrue((site / "search/search_index.json").is_file())
            self.assertTrue((site / "docs/start/overview.svg").is_file())

    def test_broken_links_are_found(self):
        with tempfile.TemporaryDirectory(prefix="mla-site-") as folder:
            site = pathlib.Path(folder)
            (site / "a.html").write_text('<h2 id="here"></h2><a href="#here">1</a>'
                                         '<a href="b.html">2</a><a href="#there">3</a>'
                                         '<a href="https://example.org/x">4</a>')
            faults = builder().broken(site)
        self.assertEqual(faults, ["a.html: b.html: no such file",
                                  "a.html: #there: no such heading"])


if __name__ == "__main__":
    unittest.main()

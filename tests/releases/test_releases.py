"""One number for everything that ships, later than every release, and a record of each release."""

import json
import re
import unittest

import release
import yaml

ROOT = release.ROOT


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def number(text):
    return tuple(int(part) for part in text.split("."))


class ReleasesTest(unittest.TestCase):
    def setUp(self):
        self.version = re.search(r'kVersion\[\] = "(.*)"', read("base/version/version.h"))[1]
        self.releases = release.releases()

    def test_one_number_everywhere(self):
        chart = yaml.safe_load(read("deploy/helm/mla-server/Chart.yaml"))
        found = {
            "C library": re.search(r'kVersion\[\] = "(.*)"', read("client/c/version.h"))[1],
            "Python client": re.search(r'^version = "(.*)"', read("client/python/pyproject.toml"),
                                       re.M)[1],
            "chart": chart["version"], "image": chart["appVersion"]}
        self.assertEqual(found, dict.fromkeys(found, self.version))

    def test_the_number_is_later_than_every_release(self):
        numbers = [number(item["version"]) for item in self.releases]
        self.assertEqual(numbers, sorted(numbers, reverse=True))
        self.assertEqual(len(set(numbers)), len(numbers))
        self.assertGreater(number(self.version), numbers[0])

    def test_every_release_is_a_commit_of_this_history(self):
        for item in self.releases:
            self.assertRegex(item["commit"], r"^[0-9a-f]{40}$")
            title = release.git("log", "-1", "--format=%s", item["commit"])
            if title is None:
                self.skipTest("no repository here that has the commits of releases")
            self.assertEqual(title, item["title"])
            self.assertIsNotNone(release.git("merge-base", "--is-ancestor", item["commit"], "HEAD"))
            # Where the number stood before base/version.
            text = release.git("show", f"{item['commit']}:server/process/version.h") or release.git(
                "show", f"{item['commit']}:base/version/version.h")
            self.assertIn(f'kVersion[] = "{item["version"]}"', text)

    def test_the_changelog_has_a_section_for_each(self):
        headings = re.findall(r"^## ([0-9.]+) \((.*)\)$", read("CHANGELOG.md"), re.M)
        expected = [(self.version, "not released")]
        expected += [(item["version"], str(item["date"])) for item in self.releases]
        self.assertEqual(headings, expected)

    def test_the_contract_of_every_release_is_kept(self):
        """Fields that a release had are in today's golden descriptor as they were."""
        for item in self.releases:
            before = release.git("show", f"{item['commit']}:proto/descriptor_golden.txt")
            if before is None:
                self.skipTest("no repository here that has the commits of releases")
            now = set(read("proto/descriptor_golden.txt").splitlines())
            lost = [line for line in before.splitlines()
                    if line not in now and "reserved" not in line]
            self.assertEqual(lost, [], json.dumps(item, default=str))


if __name__ == "__main__":
    unittest.main()

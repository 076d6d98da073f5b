"""Builds the documents as a site: mkdocs over a copy of every page of the tree.

    build_site.py [--output build/site]

Pages refer to each other and to sources by relative paths, so the copy keeps the tree's layout, and
what they link is copied with them. Every link of the built pages is then looked up; one that leads
nowhere is an error, as is a warning of mkdocs.
"""

import argparse
import html.parser
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
STYLE = pathlib.Path(__file__).with_name("extra.css")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# (heading, pages). Readers find the other pages by search and by links.
NAVIGATION = [
    ("Begin", ["README.md", "docs/start/status.md", "client/quickstart.md",
               "docs/tutorials/transformers.md", "docs/tutorials/vllm.md",
               "docs/tutorials/eight_gpus.md", "docs/start/sizing.md", "docs/start/comparison.md",
               "docs/start/faq.md", "docs/start/glossary.md"]),
    ("Install and run", ["docs/install/packages.md", "docs/install/kubernetes.md",
                         "docs/configuration.md", "docs/operations.md", "docs/cluster.md",
                         "docs/runbook.md", "docs/metrics.md",
                         "docs/security.md", "docs/install/upgrade.md",
                         "docs/install/releases.md", "CHANGELOG.md", "client/mlactl/README.md"]),
    ("Use", ["client/python/README.md", "docs/clients/c.md", "client/cpp/README.md",
             "docs/clients/transformers.md", "docs/clients/vllm.md", "docs/clients/sglang.md",
             "docs/errors.md", "docs/shared_memory.md", "proto/README.md"]),
    ("Understand", ["docs/architecture.md", "docs/internals/life_of_a_request.md",
                    "docs/kv_cache.md", "docs/cache/checkpoints.md", "docs/cache/tiers.md",
                    "docs/cache/page_groups.md", "docs/fp8.md", "docs/sparse.md",
                    "docs/reliability.md", "docs/benchmarks/README.md", "docs/adr/README.md"]),
    ("Change", ["CONTRIBUTING.md", "docs/internals/tests.md", "docs/kernels/README.md"]),
]


def tracked():
    listing = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                             capture_output=True, text=True).stdout.splitlines()
    return [path for path in listing if (ROOT / path).is_file()]


def stage(folder):
    """Copies every page, and every file that one links, to `folder`."""
    known = tracked()
    pages = [path for path in known if path.endswith(".md")]
    wanted = set(pages)
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        for link in LINK.findall(text):
            target = urllib.parse.unquote(link.split("#")[0])
            if not target or "://" in target:
                continue
            path = (ROOT / page).parent / target
            if path.is_file():
                wanted.add(path.resolve().relative_to(ROOT).as_posix())
    for name in wanted:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith(".md"):
            shutil.copyfile(ROOT / name, target)
            continue
        # A page cannot show a folder, so a link to one becomes its text.
        text = (ROOT / name).read_text(encoding="utf-8")

        def plain(found, name=name):
            target = found[2].split("#")[0]
            is_folder = target and ((ROOT / name).parent / target).is_dir()
            return found[1] if is_folder else found[0]
        if name == "CONTRIBUTING.md":  # code in a list: mkdocs asks for one more space than others
            text = re.sub(r"(?m)^ {7}", " " * 8, text)
        target.write_text(re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", plain, text), encoding="utf-8")
    shutil.copyfile(STYLE, folder / "extra.css")


def configuration(source, site):
    lines = ["site_name: mla-server", f"docs_dir: {source}", f"site_dir: {site}",
             "theme: {name: mkdocs}", "extra_css: [extra.css]", "use_directory_urls: false",
             "plugins: [search]", "strict: true", "markdown_extensions: [tables, toc, fenced_code]",
             "nav:"]
    for heading, pages in NAVIGATION:
        lines.append(f"  - {heading}:")
        lines += [f"      - {page}" for page in pages]
    return "\n".join(lines) + "\n"


class Links(html.parser.HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors.update(value for value in (values.get("id"), values.get("name")) if value)
        for name in ("href", "src"):
            if values.get(name):
                self.targets.append(values[name])


def broken(site):
    """Links of the built pages that lead nowhere."""
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    faults = []
    for path, links in pages.items():
        for target in links.targets:
            url = urllib.parse.urlsplit(target)
            if url.scheme or url.netloc or path.name == "404.html":
                continue
            other = path if not url.path else (path.parent / urllib.parse.unquote(url.path))
            other = other.resolve()
            if other.is_dir():
                other = other / "index.html"
            if not other.is_file():
                faults.append(f"{path.relative_to(site)}: {target}: no such file")
            elif url.fragment and other in pages and \
                    urllib.parse.unquote(url.fragment) not in pages[other].anchors:
                faults.append(f"{path.relative_to(site)}: {target}: no such heading")
    return faults


def build(output):
    """Makes the site in `output`; returns what is wrong with it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mla-site-") as folder:
        folder = pathlib.Path(folder)
        stage(folder / "pages")
        file = folder / "mkdocs.yml"
        file.write_text(configuration(folder / "pages", output), encoding="utf-8")
        done = subprocess.run(["/usr/bin/mkdocs", "build", "--quiet", "--clean", "--config-file",
                               str(file)], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        return [line for line in done.stderr.splitlines() if line.strip()]
    return broken(output.resolve())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build/site")
    output = parser.parse_args().output.resolve()
    faults = build(output)
    if faults:
        sys.exit("\n".join(faults))
    pages = len(list(output.rglob("*.html")))
    print(f"{pages} pages, every link resolves: {output / 'index.html'}")


if __name__ == "__main__":
    main()

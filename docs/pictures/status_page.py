"""Takes pictures of the status page of a server under load: docs/pictures/status_page_*.png.

Starts a server, has workers of three tenants compute on it with the Python client, and takes the
page with its light and its dark colors in headless Chromium. `./dev picture status_page` runs it.
"""

import argparse
import pathlib
import re
import urllib.request

from mla_client.testing import ServerProcess
from parts import browser, load

HERE = pathlib.Path(__file__).resolve().parent
WIDTH, HEIGHT = 1000, 1290
WARM_S = 20  # the page's rates are of the last minute


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True, help="path of mla-server")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, help="folder of the pictures")
    parser.add_argument("--seconds", type=float, default=WARM_S, help="load before the pictures")
    args = parser.parse_args()
    with ServerProcess(args.server, ["--ops-listen=127.0.0.1:0", "--log-level=info",
                                     "--backend=cpu", "--kv-cache-bytes=64MiB"]) as server:
        address = f"http://127.0.0.1:{re.search(r'ops_port=([0-9]+)', server.log())[1]}/statusz"
        urllib.request.urlopen(address).read()  # gives rates a first sample
        with load.load(server.target) as ended:
            ended.wait(args.seconds)
            for name, scheme in (("light", browser.LIGHT), ("dark", browser.DARK)):
                browser.shoot(address, args.out / f"status_page_{name}.png", WIDTH, HEIGHT, scheme)


if __name__ == "__main__":
    main()

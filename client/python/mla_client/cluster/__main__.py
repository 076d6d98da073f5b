"""python3 -m mla_client.cluster: see command.py."""

import sys

from mla_client.cluster.operations.command import main

if __name__ == "__main__":
    sys.exit(main())

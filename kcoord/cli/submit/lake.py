# SPDX-License-Identifier: Apache-2.0
"""`spark-submit` runs a file: this one is `kcoord lake`. Its folder is its own, since Spark puts that on the path."""

import sys

from kcoord.cli.lake import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

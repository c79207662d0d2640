# SPDX-License-Identifier: Apache-2.0
"""Runs `kcoord lake` with spark-submit. It has its own folder, since Spark adds the folder to the import path."""

import sys

from kcoord.cli.lake import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

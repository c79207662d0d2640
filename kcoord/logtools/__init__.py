# SPDX-License-Identifier: Apache-2.0
"""The offline tools for data folders: dump, verify, repair, import, export, backup and restore of offsets.

Ring 3: files are reached through the FileSystem interface, and time and random ids are arguments. No broker runs this
code.

What a tool may change, and whether a broker may be running:

* `dump`, `verify`, `restore` and `expiry` only read. They take no lock, so a broker may be writing at the same time.
  `verify` then has to be told (`in_use`).
* `backup` reads a folder that a broker may be writing to, and writes a new folder.
* `import_logs` and `export_logs` read the folder of a stopped broker and write a new folder. An export holds the locks
  of its source.
* `repair` alone changes a data folder in place. It holds the lock of the folder, and copies every byte that it removes
  to another folder first.

A new folder is built under the suffix `.incomplete` and renamed when it is complete and durable (`copying`). If a tool
is killed, the incomplete folder stays, and the next run refuses to use it. A repair that was killed can be run again.
"""

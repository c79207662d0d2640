# SPDX-License-Identifier: Apache-2.0
"""What operators do with log folders besides serving them: dump, verify, repair, import, back up, and undo.

Ring 3: files through the FileSystem interface, time and random ids as arguments. Nothing here runs in a broker.
"""

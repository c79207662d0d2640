# SPDX-License-Identifier: Apache-2.0
"""The errors that the commands of the lake print in one line, without a stack trace."""


class LakeError(Exception):
    """An error for the user. The message says what is wrong and what to do about it."""


class TablesUnavailableError(LakeError):
    """The library of a table format could not read or change a table. The same step may succeed later."""

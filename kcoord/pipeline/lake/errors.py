# SPDX-License-Identifier: Apache-2.0
"""The error that the commands of the lake print in one line, without a stack trace."""


class LakeError(Exception):
    """An error for the user. The message says what is wrong and what to do about it."""

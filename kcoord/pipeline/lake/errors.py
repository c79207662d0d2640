# SPDX-License-Identifier: Apache-2.0
"""What the user of a lake is told, in one line and without a stack trace."""


class LakeError(Exception):
    """The message names what is wrong and what to do about it."""

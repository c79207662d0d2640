# SPDX-License-Identifier: Apache-2.0
"""The errors that the commands of the lake print in one line, without a stack trace."""


class LakeError(Exception):
    """An error for the user. The message says what is wrong and what to do about it."""


class TablesUnavailableError(LakeError):
    """The library of a table format could not read or change a table. The same step may succeed later."""


def java_reason(text: str) -> str:
    """Returns the line of a Java exception that has the cause, without the stack."""
    lines = [line.strip() for line in text.splitlines()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    exception = next((line for line in lines if "Exception" in line), lines[0] if lines else "")
    return causes[-1] if causes else exception.removeprefix(": ")

# SPDX-License-Identifier: Apache-2.0
"""Ranges of hosts in ACLs (CIDR), such as 10.0.0.0/8: the texts that Kafka 4.4 accepts, and their networks."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, TypeAlias

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_PREFIX_LENGTH: Final = 128
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,9}")
_IPV4_RANGE: Final = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})/([0-9]{1,2})")
_IPV4_LIMITS: Final = (255, 255, 255, 255, 32)


def parse_range(text: str) -> Network:
    """Returns the network of a range. Bits behind the prefix are ignored.

    Raises ValueError with the text of Kafka 4.4.0 for a text that is no range.
    """
    return _ipv6_range(text) if ":" in text else _ipv4_range(text)


def _ipv4_range(text: str) -> Network:
    match = _IPV4_RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"Could not parse [{text}]")
    # Leading zeros are decimal digits in Kafka, but an error in `ipaddress`.
    *octets, length = map(int, match.groups())
    for value, limit in zip((*octets, length), _IPV4_LIMITS, strict=True):
        if value > limit:
            raise ValueError(f"Value [{value}] not in range [0,{limit}]")
    return ipaddress.IPv4Network((bytes(octets), length), strict=False)


def _ipv6_range(text: str) -> Network:
    address, _, length = text.partition("/")
    if _NUMBER.fullmatch(length) is None:
        raise ValueError(f"Could not parse [{text}] - invalid prefix length")
    if not 0 <= int(length) <= MAX_PREFIX_LENGTH:
        raise ValueError(f"Could not parse [{text}] - prefix length must be between 0 and {MAX_PREFIX_LENGTH}")
    try:
        # The zone of a link-local address does not count.
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        raise ValueError(f"Could not parse [{address}]") from None
    if parsed.ipv4_mapped is not None:
        # Java turns such an address into an IPv4 address.
        raise ValueError(f"Could not parse [{address}] - not an IPv6 address")
    return ipaddress.IPv6Network((parsed.packed, int(length)), strict=False)

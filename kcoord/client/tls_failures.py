# SPDX-License-Identifier: Apache-2.0
"""Explains a TLS handshake that failed. Kafka's clients raise SslAuthenticationException then, and do not try again."""

from __future__ import annotations

import ssl
from typing import Final

from kcoord.client.errors import SslAuthenticationException

_NAME_MISMATCHES: Final = (62, 63, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_EMAIL_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""

_WRONG_TIMES: Final = (9, 10)
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED, of any certificate of the chain."""


def handshake_failure(address: str, error: BaseException | None) -> SslAuthenticationException | None:
    """Returns the error for a connection that ended with `error`. None if that is no failure of the handshake.

    With TLS 1.3 the broker rejects the client after the client's handshake, as the response to its first request.
    """
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return None
    return SslAuthenticationException(f"{address}: SSL handshake failed: {_explained(error)}")


def _explained(error: ssl.SSLError) -> str:
    """Returns the reason, and the setting to look at."""
    if isinstance(error, ssl.SSLCertVerificationError):
        setting = "ssl.truststore.location"
        if error.verify_code in _NAME_MISMATCHES:
            setting = "ssl.endpoint.identification.algorithm"
        elif error.verify_code in _WRONG_TIMES:
            setting = "ssl.keystore.location of the broker, or an authority in ssl.truststore.location"
        return f"the broker's certificate is not accepted: {error.verify_message.rstrip('.')} ({setting})"
    reason = error.reason or str(error)
    _, is_alert, alert = reason.partition("_ALERT_")
    if "PROTOCOL_VERSION" in reason:
        return f"no common version of TLS: {_in_words(reason)} (ssl.enabled.protocols)"
    if is_alert:
        return f"the broker rejects the client: {_in_words(alert)} (ssl.keystore.location)"
    return f"the broker does not speak TLS here: {_in_words(reason)} (security.protocol)"


def _in_words(name: str) -> str:
    return name.replace("_", " ").lower()

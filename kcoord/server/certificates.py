# SPDX-License-Identifier: Apache-2.0
"""The keys and certificates of a TLS listener, from the configuration: at the start, and again when they change.

A listener reads its settings and files at the start, and an error there stops the start. Afterwards each new connection
asks for the context in use. If a dynamic config or a file has changed since, the listener reads its settings and files
again first. It looks at the files at most once a second. If the new keys cannot be used, the error is logged and the
old ones stay in use. Connections that exist keep the keys with which they began.

Everything here runs in the event loop. Reading a key file takes about a millisecond.
"""

from __future__ import annotations

import logging
import os
import ssl

from kcoord.config import BrokerConfig, ConfigError, Listener
from kcoord.config.broker_settings import BrokerSettings
from kcoord.config.keys import BROKER_KEYS
from kcoord.security.distinguished_name import subject_of
from kcoord.security.principal_mapping import PrincipalMapper, PrincipalMappingError
from kcoord.security.tls import (
    KeyEntry,
    TlsConfigError,
    TlsSettings,
    is_suite_allowed,
    load_key_entry,
    server_context,
)
from kcoord.server.api.api_table import ANONYMOUS

_logger = logging.getLogger(__name__)

_FILE_CHECK_SECONDS = 1.0
_KEYS = tuple(name for name in BROKER_KEYS if name.startswith("ssl."))
_CLIENT_AUTH = "ssl.client.auth"
_MAPPING_RULES = "ssl.principal.mapping.rules"
_AUTHORITIES = ("ssl.truststore.location", "ssl.truststore.certificates")

_Fingerprint = tuple[tuple[int, int] | None, ...]
"""Time of the last change and size of each file, None if it is missing."""


class ListenerCertificates:
    """The TLS context of one listener. The constructor raises TlsConfigError if there is none."""

    def __init__(self, config: BrokerConfig, listener: Listener) -> None:
        self._config = config
        self._listener = listener
        self._dynamic = config.dynamic
        self._settings = self._wanted = _settings_of(config, listener)
        self._fingerprint = _fingerprint_of(self._settings)
        self._looked_seconds = float("-inf")
        self._was_used = False
        self._entry = _key_entry_of(self._settings)
        self._context = server_context(self._settings, self._entry)
        try:
            self._mapper = PrincipalMapper(self._settings.text(_MAPPING_RULES) or "")
        except PrincipalMappingError as error:
            raise self._settings.error(_MAPPING_RULES, str(error)) from None
        if self._context.verify_mode is not ssl.CERT_NONE and not any(map(self._settings.text, _AUTHORITIES)):
            _logger.warning(
                "Listener %s accepts clients with a certificate of any authority of the system; set one of %s",
                listener.name,
                ", ".join(_AUTHORITIES),
            )

    def context(self, now_seconds: float) -> ssl.SSLContext:
        """Returns the context for a new connection. `now_seconds` is the event loop's time."""
        # A dynamic config that the metadata log has from before the start may name any certificate.
        if self._config.dynamic is not self._dynamic:
            self._dynamic = self._config.dynamic
            settings = _settings_of(self._config, self._listener)
            if settings != self._wanted:
                self._wanted = settings
                self._read_again(settings)
        if now_seconds - self._looked_seconds >= _FILE_CHECK_SECONDS:
            self._looked_seconds = now_seconds
            if _fingerprint_of(self._wanted) != self._fingerprint:
                self._read_again(self._wanted)
        self._was_used = True
        return self._context

    def begin(self, now_seconds: float) -> None:
        """Reads what the metadata log has from before the start; raises TlsConfigError if that cannot be used.

        The settings of the start may protect less.
        """
        self.context(now_seconds)
        if self._settings != self._wanted:
            raise TlsConfigError(
                f"The dynamic TLS configs of listener {self._listener.name} cannot be used, see the log"
            )

    def check(self, changed: BrokerSettings) -> None:
        """Raises ConfigError if the listener could not use the TLS settings of `changed` in place of those in use."""
        settings = _settings_of(changed, self._listener)
        if settings != self._wanted:
            try:
                entry = _key_entry_of(settings)
                server_context(settings, entry)
                _check_names(self._config, self._entry, entry)
            except TlsConfigError as error:
                raise ConfigError(str(error)) from None

    @property
    def handshake_timeout_seconds(self) -> float:
        """The time in which a client has to finish its handshake."""
        return self._config.kcoord_ssl_handshake_timeout_ms / 1000

    def _read_again(self, settings: TlsSettings) -> None:
        self._fingerprint = _fingerprint_of(settings)
        try:
            entry = _key_entry_of(settings)
            if self._was_used:
                _check_names(self._config, self._entry, entry)
            context = server_context(settings, entry)
        except TlsConfigError as error:
            _logger.error("Listener %s keeps its certificate: %s", self._listener.name, error)
            return
        self._settings, self._entry, self._context = settings, entry, context
        _logger.info("Listener %s uses a new certificate: %s", self._listener.name, entry.subject.rfc4514_string())

    def principal_of(self, tls: ssl.SSLObject) -> str:
        """Returns the principal of a client after the handshake. With SASL, a certificate does not name it.

        Raises TlsConfigError if the handshake agreed on a cipher suite that is not allowed, and PrincipalMappingError
        if no mapping rule matches the client's certificate.
        """
        cipher = tls.cipher()
        if cipher is not None and not is_suite_allowed(self._settings, cipher[0]):
            raise TlsConfigError(f"ssl.cipher.suites does not allow {cipher[0]}")
        certificate = None if self._listener.security_protocol.has_sasl else tls.getpeercert(binary_form=True)
        return ANONYMOUS if certificate is None else f"User:{self._mapper.name_of(subject_of(certificate))}"


def _settings_of(config: BrokerSettings, listener: Listener) -> TlsSettings:
    values: dict[str, str | list[str] | None] = {}
    has_sasl = listener.security_protocol.has_sasl
    for name in _KEYS:
        if name == _CLIENT_AUTH and has_sasl and config.name_for_listener(listener, name) == name:
            # As in Kafka, SASL replaces the certificates of clients, unless the listener itself demands both.
            continue
        value = config.value_for_listener(listener, name)
        if value is None or isinstance(value, (str, list)):
            values[name] = value
    return TlsSettings(values, {name: config.name_for_listener(listener, name) for name in _KEYS})


def _key_entry_of(settings: TlsSettings) -> KeyEntry:
    entry = load_key_entry(settings)
    if entry is None:
        raise settings.error("ssl.keystore.location", "a listener with SSL needs a private key and a certificate")
    return entry


def _check_names(config: BrokerConfig, old: KeyEntry, new: KeyEntry) -> None:
    """Raises TlsConfigError if a certificate may not replace another one. The texts are those of Kafka."""
    if old.subject != new.subject and not config.ssl_allow_dn_changes:
        raise TlsConfigError(
            "Keystore DistinguishedName does not match: "
            f"existing={old.subject.rfc4514_string()}, new={new.subject.rfc4514_string()}"
        )
    if not config.ssl_allow_san_changes and not old.alternative_names <= new.alternative_names:
        raise TlsConfigError(
            f"Keystore SubjectAlternativeNames do not match: existing={_shown(old)}, new={_shown(new)}"
        )


def _shown(entry: KeyEntry) -> list[str]:
    return sorted(str(name.value) for name in entry.alternative_names)


def _fingerprint_of(settings: TlsSettings) -> _Fingerprint:
    return tuple(_state_of(location) for location in settings.files)


def _state_of(location: str) -> tuple[int, int] | None:
    try:
        state = os.stat(location)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size

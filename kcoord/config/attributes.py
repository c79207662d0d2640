# SPDX-License-Identifier: Apache-2.0
# Written by `make generate` from keys.txt; do not edit.
"""The types of the keys that have an effect. An attribute is named like its key, with `_` for `.`."""

from __future__ import annotations


class BrokerAttributes:
    """The keys of a broker."""

    advertised_listeners: list[str] | None
    allow_everyone_if_no_acl_found: bool
    alter_config_policy_class_name: str | None
    authorizer_class_name: str
    auto_create_topics_enable: bool
    broker_id: int
    broker_rack: str | None
    client_quota_callback_class: str | None
    compression_gzip_level: int
    compression_lz4_level: int
    compression_type: str
    compression_zstd_level: int
    connection_failed_authentication_delay_ms: int
    connections_max_idle_ms: int
    connections_max_reauth_ms: int
    controller_listener_names: list[str]
    controller_quota_window_num: int
    controller_quota_window_size_seconds: int
    create_topic_policy_class_name: str | None
    default_replication_factor: int
    delegation_token_expiry_check_interval_ms: int
    delegation_token_expiry_time_ms: int
    delegation_token_max_lifetime_ms: int
    delegation_token_secret_key: str | None
    delete_topic_enable: bool
    fetch_max_bytes: int
    group_consumer_assignment_interval_ms: int
    group_consumer_assignor_offload_enable: bool
    group_consumer_assignors: list[str]
    group_consumer_heartbeat_interval_ms: int
    group_consumer_max_assignment_interval_ms: int
    group_consumer_max_heartbeat_interval_ms: int
    group_consumer_max_session_timeout_ms: int
    group_consumer_max_size: int
    group_consumer_migration_policy: str
    group_consumer_min_assignment_interval_ms: int
    group_consumer_min_heartbeat_interval_ms: int
    group_consumer_min_session_timeout_ms: int
    group_consumer_regex_refresh_interval_ms: int
    group_consumer_session_timeout_ms: int
    group_coordinator_append_linger_ms: int
    group_coordinator_background_threads: int
    group_coordinator_rebalance_protocols: list[str]
    group_coordinator_threads: int
    group_initial_rebalance_delay_ms: int
    group_max_session_timeout_ms: int
    group_max_size: int
    group_min_session_timeout_ms: int
    kcoord_assignor_inline_ms: int
    kcoord_assignor_timeout_ms: int
    kcoord_audit_events: list[str]
    kcoord_audit_log: str
    kcoord_audit_log_max_bytes: int
    kcoord_audit_log_max_files: int
    kcoord_bootstrap_features: list[str]
    kcoord_bootstrap_scram: str | None
    kcoord_client_assignor_fallback: str
    kcoord_client_assignor_group_metadata_max_bytes: int
    kcoord_client_assignor_metadata_max_bytes: int
    kcoord_client_assignors_enable: bool
    kcoord_client_telemetry_endpoint: str
    kcoord_fast_paths_enable: bool
    kcoord_kip1327_enable: bool
    kcoord_kip1327_revisions: list[str]
    kcoord_listener_principals: list[str]
    kcoord_log_flush_policy: str
    kcoord_max_id_bytes: int
    kcoord_metadata_cache_enable: bool
    kcoord_metrics_host: str
    kcoord_metrics_port: int
    kcoord_offsets_expiration_policy: str
    kcoord_partition_max_groups: int
    kcoord_release: str
    kcoord_request_max_bytes: int
    kcoord_response_buffer_max_bytes: int
    kcoord_sasl_login_timeout_ms: int
    kcoord_ssl_handshake_timeout_ms: int
    kcoord_upstream_acls_max_age_ms: int
    kcoord_upstream_authentication: str
    kcoord_upstream_bootstrap_servers: list[str]
    kcoord_upstream_group_id: str
    kcoord_upstream_heartbeat_interval_ms: int
    kcoord_upstream_import: str
    kcoord_upstream_metadata_max_age_ms: int
    kcoord_upstream_ports: list[str]
    kcoord_upstream_request_timeout_ms: int
    kcoord_upstream_sasl_jaas_config: str | None
    kcoord_upstream_sasl_login_callback_handler_class: str | None
    kcoord_upstream_sasl_login_connect_timeout_ms: int | None
    kcoord_upstream_sasl_login_read_timeout_ms: int | None
    kcoord_upstream_sasl_login_refresh_buffer_seconds: int | None
    kcoord_upstream_sasl_login_refresh_min_period_seconds: int | None
    kcoord_upstream_sasl_login_refresh_window_factor: float | None
    kcoord_upstream_sasl_login_refresh_window_jitter: float | None
    kcoord_upstream_sasl_login_retry_backoff_max_ms: int | None
    kcoord_upstream_sasl_login_retry_backoff_ms: int | None
    kcoord_upstream_sasl_mechanism: str
    kcoord_upstream_sasl_oauthbearer_client_credentials_client_id: str | None
    kcoord_upstream_sasl_oauthbearer_client_credentials_client_secret: str | None
    kcoord_upstream_sasl_oauthbearer_header_urlencode: bool | None
    kcoord_upstream_sasl_oauthbearer_jwt_retriever_class: str | None
    kcoord_upstream_sasl_oauthbearer_jwt_validator_class: str | None
    kcoord_upstream_sasl_oauthbearer_scope: str | None
    kcoord_upstream_sasl_oauthbearer_token_endpoint_url: str | None
    kcoord_upstream_security_protocol: str
    kcoord_upstream_session_timeout_ms: int
    kcoord_upstream_socket_connection_setup_timeout_ms: int
    kcoord_upstream_ssl_cipher_suites: list[str] | None
    kcoord_upstream_ssl_enabled_protocols: list[str] | None
    kcoord_upstream_ssl_endpoint_identification_algorithm: str
    kcoord_upstream_ssl_key_password: str | None
    kcoord_upstream_ssl_keystore_certificate_chain: str | None
    kcoord_upstream_ssl_keystore_key: str | None
    kcoord_upstream_ssl_keystore_location: str | None
    kcoord_upstream_ssl_keystore_password: str | None
    kcoord_upstream_ssl_keystore_type: str
    kcoord_upstream_ssl_truststore_certificates: str | None
    kcoord_upstream_ssl_truststore_location: str | None
    kcoord_upstream_ssl_truststore_password: str | None
    kcoord_upstream_ssl_truststore_type: str
    kcoord_upstream_write_timeout_ms: int
    kcoord_worker_ports: list[str]
    kcoord_worker_racks: list[str]
    listener_security_protocol_map: str
    listeners: list[str]
    log_cleaner_backoff_ms: int
    log_cleaner_dedupe_buffer_size: int
    log_cleaner_delete_retention_ms: int
    log_cleaner_enable: bool
    log_cleaner_io_max_bytes_per_second: float
    log_cleaner_max_compaction_lag_ms: int
    log_cleaner_min_cleanable_ratio: float
    log_cleaner_min_compaction_lag_ms: int
    log_cleanup_policy: list[str]
    log_dir: list[str]
    log_dirs: list[str] | None
    log_flush_interval_messages: int
    log_flush_interval_ms: int | None
    log_flush_offset_checkpoint_interval_ms: int
    log_flush_scheduler_interval_ms: int
    log_flush_start_offset_checkpoint_interval_ms: int
    log_index_interval_bytes: int
    log_index_size_max_bytes: int
    log_message_timestamp_after_max_ms: int
    log_message_timestamp_before_max_ms: int
    log_message_timestamp_type: str
    log_retention_bytes: int
    log_retention_check_interval_ms: int
    log_retention_hours: int
    log_retention_minutes: int | None
    log_retention_ms: int | None
    log_roll_hours: int
    log_roll_jitter_hours: int
    log_roll_jitter_ms: int | None
    log_roll_ms: int | None
    log_segment_bytes: int
    log_segment_delete_delay_ms: int
    max_connection_creation_rate: int
    max_connections: int
    max_connections_per_ip: int
    max_connections_per_ip_overrides: str
    max_decompressed_message_bytes: int
    max_incremental_fetch_session_cache_slots: int
    max_request_partition_size_limit: int
    message_max_bytes: int
    metadata_log_segment_bytes: int
    metric_reporters: list[str]
    min_insync_replicas: int
    node_id: int
    num_partitions: int
    offset_metadata_max_bytes: int
    offsets_commit_timeout_ms: int
    offsets_retention_check_interval_ms: int
    offsets_retention_minutes: int
    offsets_topic_compression_codec: int
    offsets_topic_num_partitions: int
    offsets_topic_replication_factor: int
    offsets_topic_segment_bytes: int
    org_apache_kafka_sasl_oauthbearer_allowed_files: list[str]
    org_apache_kafka_sasl_oauthbearer_allowed_urls: list[str]
    principal_builder_class: str
    producer_id_expiration_check_interval_ms: int
    producer_id_expiration_ms: int
    quota_window_num: int
    quota_window_size_seconds: int
    sasl_enabled_mechanisms: list[str]
    sasl_jaas_config: str | None
    sasl_login_callback_handler_class: str | None
    sasl_login_class: str | None
    sasl_oauthbearer_allow_unverified_audience: bool
    sasl_oauthbearer_allow_unverified_issuer: bool
    sasl_oauthbearer_clock_skew_seconds: int
    sasl_oauthbearer_expected_audience: list[str]
    sasl_oauthbearer_expected_issuer: str | None
    sasl_oauthbearer_jwks_endpoint_refresh_ms: int
    sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms: int
    sasl_oauthbearer_jwks_endpoint_retry_backoff_ms: int
    sasl_oauthbearer_jwks_endpoint_url: str | None
    sasl_oauthbearer_jwt_validator_class: str
    sasl_oauthbearer_scope_claim_name: str
    sasl_oauthbearer_sub_claim_name: str
    sasl_server_callback_handler_class: str | None
    sasl_server_max_receive_size: int
    socket_listen_backlog_size: int
    socket_receive_buffer_bytes: int
    socket_request_max_bytes: int
    socket_send_buffer_bytes: int
    ssl_allow_dn_changes: bool
    ssl_allow_san_changes: bool
    ssl_cipher_suites: list[str]
    ssl_client_auth: str
    ssl_enabled_protocols: list[str]
    ssl_engine_factory_class: str | None
    ssl_key_password: str | None
    ssl_keystore_certificate_chain: str | None
    ssl_keystore_key: str | None
    ssl_keystore_location: str | None
    ssl_keystore_password: str | None
    ssl_keystore_type: str
    ssl_principal_mapping_rules: str
    ssl_truststore_certificates: str | None
    ssl_truststore_location: str | None
    ssl_truststore_password: str | None
    ssl_truststore_type: str
    super_users: str
    telemetry_max_bytes: int
    transaction_max_timeout_ms: int
    transaction_partition_verification_enable: bool
    transaction_remove_expired_transaction_cleanup_interval_ms: int
    transaction_state_log_num_partitions: int
    transaction_state_log_replication_factor: int
    transaction_state_log_segment_bytes: int
    transactional_id_expiration_ms: int
    unstable_api_versions_enable: bool


class TopicAttributes:
    """The keys of a topic."""

    cleanup_policy: list[str]
    compression_gzip_level: int
    compression_lz4_level: int
    compression_type: str
    compression_zstd_level: int
    delete_retention_ms: int
    file_delete_delay_ms: int
    flush_messages: int
    flush_ms: int
    index_interval_bytes: int
    internal_segment_bytes: int | None
    max_compaction_lag_ms: int
    max_decompressed_message_bytes: int
    max_message_bytes: int
    message_timestamp_after_max_ms: int
    message_timestamp_before_max_ms: int
    message_timestamp_type: str
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    min_insync_replicas: int
    remote_storage_enable: bool
    retention_bytes: int
    retention_ms: int
    segment_bytes: int
    segment_index_bytes: int
    segment_jitter_ms: int
    segment_ms: int


class GroupAttributes:
    """The keys of a group."""

    consumer_assignment_interval_ms: int
    consumer_assignor_offload_enable: bool
    consumer_heartbeat_interval_ms: int
    consumer_session_timeout_ms: int
    kcoord_client_assignor_fallback: str
    kcoord_offsets_retention_minutes: int

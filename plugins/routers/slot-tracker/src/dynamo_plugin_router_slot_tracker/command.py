"""``dynamo slot-tracker``: the service in a process of its own."""

from __future__ import annotations

import click

from dynamo_plugin_router_slot_tracker.held_capacity import MAX_HELD
from dynamo_plugin_router_slot_tracker.registry import EXPIRY, MAX_HASHES, MAX_RANKS, MAX_TRACKERS
from dynamo_plugin_router_slot_tracker.replication.replicas import SyncSettings
from dynamo_plugin_router_slot_tracker.service import DEFAULT_PORT, ServiceSettings, listener_tls


def _listed(value: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (value or "").split(",") if part.strip())


@click.command("slot-tracker", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to bind.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port to bind; 0 for a free one.",
)
@click.option(
    "--replica-sync-bind",
    metavar="ENDPOINT",
    help="Tell replicas what happens here, on this ZMQ endpoint, such as tcp://*:8092.",
)
@click.option(
    "--replica-sync-advertise",
    metavar="ENDPOINT",
    help="That endpoint as other hosts reach it; it is refused as a peer.",
)
@click.option(
    "--replica-sync-peers", metavar="ENDPOINTS", help="Endpoints of the replicas to listen to, with commas between."
)
@click.option(
    "--replica-sync-gaps",
    is_flag=True,
    help="Number what replicas are told, and fetch what was lost from those that have this option too.",
)
@click.option(
    "--expiry",
    type=click.FloatRange(min=0, min_open=True),
    default=EXPIRY,
    show_default=True,
    help="Seconds after which a request no longer counts.",
)
@click.option(
    "--max-ranks",
    type=click.IntRange(min=1),
    default=MAX_RANKS,
    show_default=True,
    help="Most ranks of all workers together.",
)
@click.option(
    "--max-trackers",
    type=click.IntRange(min=1),
    default=MAX_TRACKERS,
    show_default=True,
    help="Most pairs of model and tenant.",
)
@click.option(
    "--max-hashes",
    type=click.IntRange(min=1),
    default=MAX_HASHES,
    show_default=True,
    help="Most sequence hashes of one request.",
)
@click.option(
    "--max-held",
    type=click.IntRange(min=1),
    default=MAX_HELD,
    show_default=True,
    help="Most sequence hashes of all active requests; a tenant may hold as many as are free.",
)
@click.option(
    "--token",
    envvar="SLOT_TRACKER_TOKEN",
    show_envvar=True,
    help="Ask for this bearer token, or for the one that has this `sha256:` hash.",
)
@click.option("--tls-cert", metavar="FILE", help="PEM file with the certificate of this host: serve HTTPS.")
@click.option("--tls-key", metavar="FILE", help="PEM file with its private key, if that is another one.")
@click.option("--tls-client-ca", metavar="FILE", help="PEM file with the authorities of clients: refuse all others.")
@click.option("--metrics", is_flag=True, help="Serve GET /metrics.")
@click.option("--snapshot", is_flag=True, help="Serve GET /snapshot, for replicas that start later.")
@click.option(
    "--snapshot-from", metavar="URLS", help="Begin with the snapshot of the first of these services that gives one."
)
@click.option("--snapshot-ca", metavar="FILE", help="PEM file with the authority of their certificates.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="The least severe level that is logged.",
)
@click.option("--log-json", is_flag=True, help="Write the log as JSON lines.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    replica_sync_bind: str | None,
    replica_sync_advertise: str | None,
    replica_sync_peers: str | None,
    replica_sync_gaps: bool,
    tls_cert: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
    snapshot_from: str | None,
    log_level: str,
    log_json: bool,
    **plain: object,
) -> None:
    """Account for the active requests of workers, for routers in any language.

    Clients register workers, tell what becomes of requests, and ask how busy each worker is or would be, over HTTP. No
    other service is needed. Without --token everybody who reaches the port may ask: keep it in a network you trust.
    """
    from dynamo_core.errors import ConfigError

    from dynamo_plugin_router_slot_tracker.main import serve

    sync = None
    if replica_sync_bind is not None:
        sync = SyncSettings(replica_sync_bind, replica_sync_advertise, _listed(replica_sync_peers), replica_sync_gaps)
    elif replica_sync_advertise is not None or replica_sync_peers is not None:
        raise ConfigError("--replica-sync-advertise and --replica-sync-peers require --replica-sync-bind")
    elif replica_sync_gaps:
        raise ConfigError("--replica-sync-gaps requires --replica-sync-bind")
    settings = ServiceSettings(
        sync=sync,
        tls=listener_tls(tls_cert, tls_key, tls_client_ca),
        snapshot_from=_listed(snapshot_from),
        **plain,  # type: ignore[arg-type]
    )
    ctx.exit(serve(settings, log_level=log_level, log_json=log_json))

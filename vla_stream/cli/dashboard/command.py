"""`vla-stream dashboard`: a live web page of one run, served from this process."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from pathlib import Path

import click

from vla_stream.cli.dashboard.access import Access
from vla_stream.cli.options import Target, find_run, find_target, run_options
from vla_stream.errors import InputError

PACKAGES = ("starlette", "uvicorn", "plotly")


@click.command()
@run_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0 is all of them.")
@click.option("--port", type=click.IntRange(0, 65535), default=8642, show_default=True, help="0: any free one.")
def dashboard(run_name: str | None, redis_url: str | None, runs_dir: Path, host: str, port: int) -> None:
    """Serve a web page that shows a run live: its loop, bottleneck, workers, curves, cameras and events.

    On loopback (the default) everybody on this machine may look; the buttons need the token that is part of the
    printed address, and on any other address so does the page. A run that is not there yet is waited for.
    """
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise InputError(f"dashboard: {missing[0]} is not installed; run tools/setup dashboard")
    run = find_run(run_name, runs_dir)
    if redis_url is not None:
        from vla_stream.broker.connection import connect

        connect(redis_url, name="vla-stream-dashboard").close()  # raises InputError where the url is malformed

    def find() -> Target:
        return find_target(run, redis_url, runs_dir)

    import uvicorn

    from vla_stream.cli.dashboard.poller import Poller
    from vla_stream.cli.dashboard.server import make_app

    with _listen(host, port) as listener:
        access = Access(host, listener.getsockname()[1])
        poller = Poller(find)
        config = uvicorn.Config(
            make_app(access, poller, find),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
        click.echo(f"run {run}: open {_address(access)}    (Ctrl-C ends the dashboard, not the run)")
        poller.start()
        with contextlib.closing(poller):
            uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Raises InputError, before anything is started."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as exc:
        raise InputError(
            f"dashboard: cannot listen at {host} port {port} ({exc.strerror or exc}); give another --port or --host"
        ) from exc


def _address(access: Access) -> str:
    """What a person opens."""
    host = socket.gethostname() if access.host in ("0.0.0.0", "::", "") else access.host
    return f"http://{f'[{host}]' if ':' in host else host}:{access.port}/?token={access.token}"

"""``recurra serve``: the HTTP server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recurra.cli.flags import Model, engine_flags, server_flags, takes
from recurra.cli.running import engine_config

if TYPE_CHECKING:
    from recurra.config.server import ServerConfig


@takes(server=server_flags(), engine=engine_flags())
def serve(model: Model, *, server: ServerConfig, engine: dict[str, Any]) -> int:
    """Serve a model over HTTP with OpenAI's API; ends gracefully with Ctrl-C."""
    from recurra.server import serve as run_server

    return run_server(server, engine_config(model, engine))

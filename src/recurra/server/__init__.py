"""The HTTP server in front of an engine in its own process.

>>> exit_code = serve(ServerConfig(port=8000), EngineConfig(model="checkpoints/mamba2-130m"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recurra.config.engine import EngineConfig
    from recurra.config.server import ServerConfig


def serve(server_config: ServerConfig, engine_config: EngineConfig) -> int:
    """Serve until a signal; returns the process's exit code.

    Returns:
        0 after a graceful stop, 128 + N after a second signal N.

    Raises:
        ConfigError: a setting that can't work, of the server or of the engine.
        CheckpointError: the model or its tokenizer can't be read.
        EngineDeadError: the engine can't be kept running; the log has the details.
        MissingDependencyError: a package is not installed; those of the ``serve`` extra are optional.
    """
    from recurra.errors import missing_dependency

    try:
        from recurra.server.run import run
    except ModuleNotFoundError as error:
        raise missing_dependency(error, "recurra serve") from error
    return run(server_config, engine_config)

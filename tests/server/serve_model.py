"""Serves a checkpoint as ``recurra serve`` does: ``python serve_model.py '{"port": 0}' '{"model": "..."}'``."""

from __future__ import annotations

import json
import sys

from recurra.config.engine import EngineConfig
from recurra.config.server import ServerConfig
from recurra.server import serve

if __name__ == "__main__":
    server, engine = (json.loads(argument) for argument in sys.argv[1:3])
    sys.exit(serve(ServerConfig(**server), EngineConfig(**engine)))

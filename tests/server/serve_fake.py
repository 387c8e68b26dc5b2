"""Serves the fake engine as a program: ``python serve_fake.py '{"port": 0}' '{"step_seconds": 0.01}'``."""

from __future__ import annotations

import json
import sys

from fake_engine import FakeConfig, build_fake, byte_tokenizer

from recurra.config.server import ServerConfig
from recurra.errors import ConfigError, RecurraError
from recurra.server import run as runner


def main() -> int:
    server, engine = (json.loads(argument) for argument in sys.argv[1:3])
    runner.load_tokenizer = lambda config: byte_tokenizer()
    try:
        return runner.run(ServerConfig(**server), FakeConfig(**engine), build_fake)
    except RecurraError as error:
        print(type(error).__name__, error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())

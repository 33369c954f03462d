"""`tierax serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import logging
import os

from .config_file import add_config_option, parse
from .option import Parser, add_options
from .options import NAME_OPTION, add_engine_options, engine_config
from .options_of_server import SERVER_OPTIONS, server_config


def run(argv: list[str]) -> int:
    """Parses, starts the server, and returns its exit code once it has shut down."""
    parser = Parser("tierax serve", "Serve a model over HTTP.")
    add_config_option(parser)
    add_options(parser, (*SERVER_OPTIONS, NAME_OPTION), "server")
    add_engine_options(parser)
    values = parse(parser, argv)
    server = server_config(values, os.environ)
    config = engine_config(values, parser)

    if server.log_level != "debug":
        # At info level jax tells which backends it did not find, ahead of any message of ours.
        logging.getLogger("jax").setLevel(logging.WARNING)

    if config.process_id:
        logging.basicConfig(level=server.log_level.upper())
        from ..engine.follower import follow

        return follow(config)

    from ..serving.server import run as run_server

    return run_server(config, server)

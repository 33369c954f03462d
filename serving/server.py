"""`tierax serve`: builds the engine, serves it until a signal comes, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ..engine.config import ConfigError, EngineConfig
from .app import make_app
from .batch.archive import check_data_dir
from .config import ServerConfig
from .core.keys import CONFIG, SERVICE
from .core.service import EngineRunner, Service
from .core.warming import Line, read_warmup_file, warm_all
from .events.publisher import check_endpoints
from .http.auth import load_keys, salted
from .http.errors import ApiError
from .http.headers import AccessLog
from .observe.tracing import check_packages
from .summary import cache_lines

EXIT_PORT_IN_USE = 2
POLL = 0.1
"""Seconds between looks at the engine's thread."""
PROGRESS_POLLS = 30
"""Looks between two lines about the warm-up."""
LINGER = 2.0
"""Seconds in which the rest of a refused body is thrown away, so that its sender gets to read the refusal."""


def run(config: EngineConfig, server: ServerConfig) -> int:
    """Serves until SIGINT or SIGTERM; returns the process's exit code.

    2 when the port cannot be had, 1 when the engine stopped by itself. Raises `ConfigError` for settings that do
    not fit the model or the machine.
    """
    logging.basicConfig(
        level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Before the model is loaded, which takes a while: a port in use should show at once.
    try:
        listener = bind(server.host, server.port)
    except OSError as error:
        print(f"tierax serve: {_listen_problem(server, error)}", file=sys.stderr)
        return EXIT_PORT_IN_USE
    with listener:
        # So should mistakes in files.
        load_keys(server)
        if server.otlp_endpoint is not None:
            check_packages()
        if (events := server.kv_events_config()) is not None:
            check_endpoints(events, config.dp_size)
        tls_context(server)
        check_data_dir(server)
        warmup = read_warmup_file(server.warmup_file) if server.warmup_file is not None else []
        # jax and the model's code load here, not when the command is parsed.
        from ..engine.replicas import load_thread

        return asyncio.run(serve(load_thread(config), server, listener, warmup=warmup))


async def serve(
    thread: EngineRunner,
    server: ServerConfig,
    listener: socket.socket,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    *,
    warmup: Sequence[Line] = (),
) -> int:
    """Starts the engine's thread and serves on `listener` until a signal or the engine's end; `say` tells of it.

    `warmup` is computed before the server is ready. A first signal lets running requests end, and then writes to the
    disk, each within its bound; a second one ends all waiting.
    """
    tls = tls_context(server)
    signals = Signals()
    signals.second.add_done_callback(lambda _: thread.hurry())
    runner = make_runner(make_app(thread, server))
    service = runner.app[SERVICE]
    service.warm = not warmup
    await runner.setup()
    thread.start()
    try:
        try:
            await web.SockSite(runner, listener, ssl_context=tls).start()
        except OSError as error:
            # Bound by another process too, at the same moment: only one of them gets to listen.
            say(f"tierax serve: {_listen_problem(server, error)}")
            return EXIT_PORT_IN_USE
        if await _warm_up(thread, signals.first, say) and await _warm_cache(
            service, warmup, signals.first, say
        ):
            _keep_for_good()
            say(ready_text(thread, server, listener))
        while thread.alive and not signals.first.done():
            await asyncio.wait((signals.first,), timeout=POLL)
        if not signals.first.done():
            say("The engine has stopped; its log says why.")
            return 1
        say("Shutting down: finishing what runs; once more to stop at once.")
        draining = asyncio.ensure_future(service.drain(server.shutdown_timeout))
        await asyncio.wait((draining, signals.second), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        return 0
    finally:
        await runner.cleanup()
        await asyncio.to_thread(thread.close, server.disk_drain_timeout)
        signals.close()
        gc.unfreeze()


def make_runner(app: web.Application) -> web.AppRunner:
    """A runner as the application needs it.

    Handlers are cancelled when their client goes away, which aborts their generations; bodies arrive as they were
    sent, for `read_body` to unpack within bounds.
    """
    return web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        lingering_time=LINGER,
        shutdown_timeout=1.0,
        keepalive_timeout=app[CONFIG].idle_timeout,
        access_log=logging.getLogger(f"{__name__}.access"),
        access_log_class=AccessLog,
        logger=_http_log,
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port, but refuses connections until something listens on it. Raises `OSError`."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    holder = socket.socket(family, kind, protocol)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(address)
    except OSError:
        holder.close()
        raise
    return holder


def ready_text(thread: EngineRunner, server: ServerConfig, listener: socket.socket) -> str:
    """What to tell once calls are taken: the address, what the tiers hold, a command to try, and where to watch."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    key = ' -H "Authorization: Bearer $API_KEY"' if server.locked else ""
    scheme = "http" if server.ssl_certfile is None else "https"
    cache = "\n".join(cache_lines(thread.engine))
    return (
        f"Ready: {thread.engine.model_name} on {scheme}://{host}:{port}/v1, with a cache of\n{cache}\ntry\n"
        f"  curl {scheme}://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        """    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'"""
        f"\nor watch it on {scheme}://{host}:{port}/dashboard"
    )


def _listen_problem(server: ServerConfig, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {server.port} on {server.host} is in use; choose another with --port"
    return f"cannot listen on {server.host} port {server.port}: {error.strerror or error}"


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """What HTTPS needs; None = plain HTTP. Raises `ConfigError`."""
    if server.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        files = (
            server.ssl_certfile
            if server.ssl_keyfile is None
            else f"{server.ssl_certfile}, {server.ssl_keyfile}"
        )
        reason = error.reason if isinstance(error, ssl.SSLError) else getattr(error, "strerror", None)
        raise ConfigError(f"ssl_certfile: {files}: {reason or error}") from None
    return context


def _no_password() -> str:
    raise ValueError("the private key has a password, which nobody could type here")


class _ClientMistakes(logging.Filter):
    """Drops what aiohttp reports, at length and word for word, when somebody sends no proper HTTP."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_ClientMistakes())


class Signals:
    """SIGINT and SIGTERM as futures: `first` asks to end gracefully, `second` at once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = self._loop.create_future()
        self.second: asyncio.Future[None] = self._loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(None)
                return

    def close(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


async def _warm_up(
    thread: EngineRunner, signal_came: asyncio.Future[None], say: Callable[[str], None]
) -> bool:
    """Tells of the progress until the engine is ready (True), has died, or a signal came (False)."""
    polls = 0
    while thread.alive and not thread.ready and not signal_came.done():
        if polls % PROGRESS_POLLS == 0:
            stats = thread.stats
            say(f"Warming up: {stats.warm_programs} of {stats.step_programs} programs ready")
        polls += 1
        await asyncio.wait((signal_came,), timeout=POLL)
    return thread.alive and thread.ready


async def _warm_cache(
    service: Service, lines: Sequence[Line], signal_came: asyncio.Future[None], say: Callable[[str], None]
) -> bool:
    """Computes the prompts of a warm-up file, telling of its progress and of bad lines; False if a signal came before.

    Nothing that is wrong with them keeps the server from starting.
    """
    if not lines:
        return True
    computing = asyncio.ensure_future(_compute_lines(service, lines, say))
    await asyncio.wait((computing, signal_came), return_when=asyncio.FIRST_COMPLETED)
    computing.cancel()
    try:
        await computing
    except (asyncio.CancelledError, ApiError):
        # A signal came, or the engine has died.
        return False
    service.warm = True
    return not signal_came.done()


def _keep_for_good() -> None:
    """Spares the garbage collector what has been loaded and compiled by now, which stays.

    To look through all of it takes a tenth of a second and more, in which the interpreter does nothing else.
    """
    gc.collect()
    gc.freeze()


async def _compute_lines(service: Service, lines: Sequence[Line], say: Callable[[str], None]) -> None:
    started = told = service.clock()
    computed = cached = failed = count = 0
    for line in lines:
        if line.error is not None:
            failed += 1
            say(f"Warm-up file, line {line.number}: {line.error}")
    good = [line for line in lines if line.item is not None]
    items = [(line.item, salted(None, line.cache_salt)) for line in good if line.item is not None]
    async for place, result in warm_all(service, items, lambda place: ""):
        count += 1
        if "error" in result:
            failed += 1
            say(f"Warm-up file, line {good[place].number}: {result['error']['message']}")
        else:
            computed += result["computed_tokens"]
            cached += result["cached_tokens"]
        if service.clock() >= told + POLL * PROGRESS_POLLS:
            told = service.clock()
            say(f"Warming the cache: {count} of {len(items)} prompts")
    say(
        f"Cache warmed in {service.clock() - started:.1f} s: {len(items)} prompts, {computed} tokens computed,"
        f" {cached} cached already, {failed} lines failed"
    )

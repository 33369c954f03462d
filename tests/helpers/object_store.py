"""As much of an S3 server as a key-value store needs: one bucket, in memory, path-style addresses, no signatures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "pages"


class ObjectStore:
    """A running server; `objects` is the bucket."""

    def __init__(self, server: ThreadingHTTPServer, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.broken = False
        """Every request is answered with 500."""
        self._server = server

    def spec(self, prefix: str = "cache/") -> str:
        """The tensorstore spec of a store below `prefix`, as JSON."""
        return json.dumps(
            {
                "driver": "s3",
                "bucket": BUCKET,
                "path": prefix,
                "endpoint": f"http://127.0.0.1:{self._server.server_port}",
                "aws_region": "us-east-1",
                "aws_credentials": {"type": "anonymous"},
                "s3_request_retries": {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"},
            }
        )


@contextlib.contextmanager
def running_object_store() -> Iterator[ObjectStore]:
    objects: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, query = self._target()
            if "list-type" in query:
                self._answer(200, _listing(objects, query.get("prefix", [""])[0]), type="application/xml")
            elif path in objects:
                self._answer(200, objects[path], etag=_etag(objects[path]))
            else:
                self._answer(404)

        do_HEAD = do_GET

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path, _ = self._target()
            objects[path] = body
            self._answer(200, etag=_etag(body))

        def do_DELETE(self) -> None:
            objects.pop(self._target()[0], None)
            self._answer(204)

        def _target(self) -> tuple[str, dict[str, list[str]]]:
            parts = urlsplit(self.path)
            return unquote(parts.path).removeprefix(f"/{BUCKET}/"), parse_qs(
                parts.query, keep_blank_values=True
            )

        def _answer(self, status: int, body: bytes = b"", *, etag: str = "", type: str = "") -> None:
            self.send_response(500 if store.broken else status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("x-amz-bucket-region", "us-east-1")
            if etag:
                self.send_header("ETag", etag)
            if type:
                self.send_header("Content-Type", type)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    store = ObjectStore(server, objects)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


def _listing(objects: dict[str, bytes], prefix: str) -> bytes:
    entries = "".join(
        f"<Contents><Key>{escape(name)}</Key><Size>{len(body)}</Size><ETag>{escape(_etag(body))}</ETag></Contents>"
        for name, body in sorted(objects.items())
        if name.startswith(prefix)
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
    ).encode()

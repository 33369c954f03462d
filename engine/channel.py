"""Messages between the processes of one engine: length-framed msgpack over TCP, in order, with heartbeats.

A message is a list of strings, numbers, bytes, lists and NumPy arrays. Whoever hears nothing for `SILENCE` seconds, or finds the
connection closed, takes the other process for lost; there is no way on from there, since its part of the model is gone.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

BEAT = 2.0
"""Seconds between heartbeats."""
SILENCE = 15.0
"""Seconds without a word after which the other side is lost."""
GRACE = 5.0
"""Seconds in which the other side is to close after a last message."""
LARGEST = 1 << 28
"""Bytes of a message; a longer one is none of ours. (Nor are four letters, which say more.)"""
_LENGTH = struct.Struct("<I")
_ARRAY = 1


class ChannelError(Exception):
    """The other side cannot be reached, or says what nobody understands."""


class Connection:
    """One end. Its threads end with `close`, or when the other side is lost.

    lost: called at most once, in a thread of the connection's, with what has happened; not after `close`.
    """

    def __init__(self, sock: socket.socket, peer: str, lost: Callable[[str], None]) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(SILENCE)
        self.peer = peer
        self._sock = sock
        self._lost = lost
        self._messages: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._threads = [
            threading.Thread(target=run, name=f"{name} {peer}", daemon=True)
            for run, name in ((self._read, "hears"), (self._beat, "tells"))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, *message: Any) -> None:
        """Hands a message over; a lost connection is told of by `lost` alone."""
        self._send(msgspec.msgpack.encode(message, enc_hook=_encode))

    def receive(self, timeout: float | None = None) -> list[Any]:
        """The next message. Raises `ChannelError` when none comes in time, or none can come any more."""
        try:
            message = self._messages.get(timeout=timeout)
        except queue.Empty:
            raise ChannelError(f"{self.peer} has not answered within {timeout:g} s") from None
        if message is None:
            self._messages.put(None)
            raise ChannelError(f"{self.peer} is gone")
        return message

    def put(self, *message: Any) -> None:
        """Has the next `receive` without another message return this one: a word of ours to ourselves."""
        self._messages.put(list(message))

    def finish(self, *message: Any) -> None:
        """Sends a last message, after which the other side closes, waits for that within `GRACE` seconds, and closes."""
        if self._stop():
            self.send(*message)
            # Closed from here, what the other side is just sending would reset the connection, and lose the message.
            self._threads[0].join(GRACE)
        self.close()

    def close(self) -> None:
        """Ends the connection and its threads. A second time it does nothing."""
        self._stop()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._sock.close()

    def _stop(self) -> bool:
        """Nothing that happens from now on is a loss. False if that was so already."""
        with self._ending:
            first = not self._closed.is_set()
            self._closed.set()
        return first

    def _send(self, body: bytes) -> None:
        try:
            with self._sending:
                self._sock.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            self._end(f"{self.peer} cannot be reached any more: {error}")

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            # An empty body is a heartbeat.
            self._send(b"")

    def _read(self) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
                if length > LARGEST:
                    raise ChannelError(f"{self.peer} sends {length} bytes: this is no process of tierax")
                if length:
                    decoded = msgspec.msgpack.decode(self._exactly(length), ext_hook=_decode)
                    self._messages.put(decoded)
        except TimeoutError:
            self._end(f"nothing was heard of {self.peer} for {SILENCE:g} s")
        except (OSError, ChannelError, msgspec.DecodeError) as error:
            self._end(str(error))
        finally:
            self._messages.put(None)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._sock.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise ChannelError(f"{self.peer} has ended")
            parts += part
        return bytes(parts)

    def _end(self, reason: str) -> None:
        if self._stop():
            self._lost(reason)


def accept(listener: socket.socket, timeout: float) -> socket.socket:
    """The next connection. Raises `ChannelError` when none comes in time."""
    listener.settimeout(timeout)
    try:
        return listener.accept()[0]
    except TimeoutError:
        raise ChannelError(f"no other process has come within {timeout:g} s") from None


def listen(host: str, port: int) -> socket.socket:
    """A socket that others can `connect` to. Raises `ChannelError` when the address cannot be had."""
    try:
        return socket.create_server((host, port), backlog=64)
    except OSError as error:
        raise ChannelError(f"{host}:{port} cannot be listened on: {error.strerror or error}") from None


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """Tries until somebody listens. Raises `ChannelError` when nobody does in time."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host, port), timeout=SILENCE)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ChannelError(f"{host}:{port} does not answer: {error.strerror or error}") from None
            time.sleep(0.1)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        head = msgspec.msgpack.encode((array.dtype.str, array.shape))
        return msgspec.msgpack.Ext(_ARRAY, _LENGTH.pack(len(head)) + head + array.tobytes())
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _decode(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ChannelError(f"a value of the unknown kind {code}")
    (size,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + size
    dtype, shape = msgspec.msgpack.decode(data[_LENGTH.size : start])
    return np.frombuffer(data[start:], np.dtype(dtype)).reshape(shape)

"""What is in a server's cache, told by its events: a router's view, in a few lines. Needs pyzmq and msgspec.

tierax serve demo --kv-events-config '{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
python examples/kv_events.py tcp://localhost:5557 tcp://localhost:5558
"""

from __future__ import annotations

import sys
from contextlib import suppress

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


class View:
    """The blocks of each tier."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.next = 0
        """The sequence of the message that should come next."""

    def take(self, sequence: int, payload: bytes) -> None:
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            match event:
                case ["BlockStored", hashes, _, _, _, _, medium, *_]:
                    self.tiers[medium].update(hashes)
                case ["BlockRemoved", hashes, medium, *_]:
                    self.tiers[medium].difference_update(hashes)
                case ["AllBlocksCleared"]:
                    for blocks in self.tiers.values():
                        blocks.clear()
        self.next = sequence + 1

    def __str__(self) -> str:
        return ", ".join(f"{medium} {len(blocks)}" for medium, blocks in self.tiers.items())


def replay(socket: zmq.Socket, view: View) -> None:
    """Takes the messages from the one on that should come next, as far as the server still has them."""
    socket.send_multipart([b"", view.next.to_bytes(8, "big")])
    while (message := socket.recv_multipart())[1] != END:
        view.take(int.from_bytes(message[1], "big"), message[2])


def main() -> None:
    events, missed = sys.argv[1:3]
    view = View()
    with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as dealer:
        sub.linger = dealer.linger = 0
        sub.subscribe("")
        sub.connect(events)
        dealer.connect(missed)
        replay(dealer, view)
        print(view, flush=True)
        while True:
            _, number, payload = sub.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if sequence > view.next:
                replay(dealer, view)
            if sequence >= view.next:
                view.take(sequence, payload)
            print(view, flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()

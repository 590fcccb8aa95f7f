"""A stand-in for a CUDA stream and its events, which a test moves on by hand."""

from __future__ import annotations

import threading

__all__ = ["HandEvent", "HandStream"]


class HandStream:
    """Carries out what is queued when it is told to."""

    def __init__(self, device: object = None) -> None:
        self.names: list[str] = []
        self.num_ended = 0
        self.num_synchronized = 0
        self.moved = threading.Condition()

    def queue(self, name: str) -> None:
        self.names.append(name)

    def end(self, num: int = 1) -> None:
        with self.moved:
            self.num_ended = min(self.num_ended + num, len(self.names))
            self.moved.notify_all()

    def synchronize(self) -> None:
        if HandEvent.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self.num_synchronized += 1
        self.end(len(self.names))


class HandEvent:
    is_lost = False  # the device

    def __init__(self, **_: object) -> None:
        self._stream: HandStream | None = None
        self._at = 0

    def record(self, stream: HandStream) -> None:
        if HandEvent.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self._stream, self._at = stream, len(stream.names)

    def query(self) -> bool:
        if HandEvent.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        assert self._stream is not None
        return self._stream.num_ended >= self._at

    def synchronize(self) -> None:
        stream = self._stream
        assert stream is not None
        with stream.moved:
            while not self.query():
                stream.moved.wait(0.01)

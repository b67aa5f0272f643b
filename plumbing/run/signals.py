"""Signals that stop a run at the end of its step or its evaluation."""

import contextlib
import os
import signal
import threading
from typing import Any


class Signals(list[int]):
    """The stop signals received so far. Used as a context, it catches them; a second SIGINT exits at once."""

    def __init__(self):
        super().__init__()
        self.evaluating = False  # an evaluation takes longer than a step, so the user is told that it ends first
        self.before: dict[int, Any] = {}

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            return self  # Python lets only the main thread handle signals
        numbers = [signal.SIGTERM, signal.SIGINT]
        # SIGHUP comes when a terminal closes, SIGUSR1 from Slurm (--signal=USR1@90). Windows has neither, and nohup
        # ignores SIGHUP
        others = [getattr(signal, name) for name in ("SIGHUP", "SIGUSR1") if hasattr(signal, name)]
        numbers += [number for number in others if signal.getsignal(number) != signal.SIG_IGN]
        self.before = {number: signal.signal(number, self.record) for number in numbers}
        return self

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def record(self, number, frame):
        if number == signal.SIGINT and number in self:
            os._exit(128 + number)
        if self.evaluating and not self:
            with contextlib.suppress(OSError):  # not print, because the signal may interrupt another print
                os.write(1, b"Stopping after this evaluation.\n")
        self.append(number)

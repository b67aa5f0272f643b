"""Signals that stop a run at the end of its step or its evaluation."""

import contextlib
import os
import signal
import threading
from typing import Any

# these stop no run: crashes; timers, which profilers set; a failed write; what ends no process; what nobody can catch
OTHERS = (
    "ABRT BUS FPE ILL SEGV SYS TRAP ALRM PROF VTALRM PIPE XFSZ CHLD CONT INFO TSTP TTIN TTOU URG WINCH KILL STOP"
)


class Signals(list[int]):
    """The stop signals received so far: any that ends a process unless it is caught, because schedulers send many.

    Used as a context, it catches them. A second SIGINT exits at once.
    """

    def __init__(self):
        super().__init__()
        self.evaluating = False  # an evaluation takes longer than a step, so the user is told that it ends first
        self.before: dict[int, Any] = {}

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            return self  # Python lets only the main thread handle signals
        others = {getattr(signal, f"SIG{name}", None) for name in OTHERS.split()}
        for number in signal.valid_signals() - others:
            handler = signal.getsignal(number)
            # nohup ignores SIGHUP. A script ignores SIGINT in what it starts with &, but `kill -INT` still means it
            stays = handler == signal.SIG_IGN and number not in (signal.SIGINT, signal.SIGTERM)
            if handler is not None and not stays:  # None: it is not Python's
                self.before[number] = signal.signal(number, self.record)
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

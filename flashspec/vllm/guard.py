"""A small parent that does not let its child outlive the one who asked for it.

    python -m flashspec.vllm.guard GRACE COMMAND...

It runs COMMAND in a session of its own and waits for one of two things: the command ends (then it ends with the same
status), or its parent says so on its standard input, or dies, however it dies, which ends that input. Then the whole
session gets SIGTERM and, after GRACE seconds or when the parent says KILL, SIGKILL: vLLM's workers survive their own
parent's SIGKILL.

It knows processes and nothing else; nothing is imported that takes time or memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

POLL = 0.1  # seconds
STOP, KILL = b"s", b"k"  # what the parent may say


def main() -> int:
    grace, words, parent = float(sys.argv[1]), sys.argv[2:], os.getppid()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # they are meant for our parent, who will let go of the pipe
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=as_usual)
    while child.poll() is None:
        word = said(POLL)
        if word is not None or os.getppid() != parent:  # a copy of our parent may still hold the pipe
            end(child, 0.0 if word and KILL in word else grace)
            break
    end(child, 0.0)  # workers that the command has left behind
    status = child.wait()
    return 128 - status if status < 0 else status


def as_usual() -> None:
    """In the child: signals do again what they do."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


def said(seconds: float) -> bytes | None:
    """What the parent says within some seconds; nothing at all (b"") when it is gone, None while it is silent."""
    readable, _, _ = select.select([0], [], [], seconds)
    return os.read(0, 4096) if readable else None


def end(child: subprocess.Popen[bytes], grace: float) -> None:
    """SIGTERM for the whole session, and SIGKILL for what is left of it after ``grace`` seconds."""
    with contextlib.suppress(ProcessLookupError):
        if grace:
            os.killpg(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            child.poll()
            os.killpg(child.pid, 0)
            if (word := said(POLL)) == b"":
                time.sleep(POLL)
            elif word and KILL in word:
                break
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

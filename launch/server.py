"""Start an SGLang server as a child process, wait until it answers, and stop it with everything it started.

with start(["--model-path", folder, "--dtype", "float32"], log="server.log") as server:
    requests.post(server.url + "/generate", json={"text": "Hello"})
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_GRACE_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_PORT_TAKEN, _PORT_RETRIES = "EADDRINUSE", 2

_groups: set[int] = set()  # process groups of servers that this process has started and not yet stopped


def end_servers_on_sigterm() -> None:
    """SIGTERM ends this process and every server that it has started, those that are still starting too."""

    def end(*_) -> None:
        for group in list(_groups):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


class ServerError(RuntimeError):
    """The server did not come up; the message carries the end of its log."""


@dataclass
class Server:
    url: str
    process: subprocess.Popen
    log: Path

    def stop(self) -> None:
        """End the server's whole process group. Returns when none of it runs; may be called twice."""
        # SGLang ends its own processes; one that died of a signal of its own would pass for a crash.
        self.process.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and _group_runs(self.process):
            time.sleep(0.1)
        if _group_runs(self.process):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=_GRACE_SECONDS)
        _groups.discard(self.process.pid)

    def log_tail(self, lines: int = 30) -> str:
        with self.log.open("rb") as stream:
            stream.seek(max(0, self.log.stat().st_size - 400 * lines))
            text = stream.read().decode(errors="replace")
        return "\n".join("  | " + line for line in text.splitlines()[-lines:])

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        self.stop()


def start(
    arguments: Sequence[str],
    *,
    log: str | Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> Server:
    """Run `python -m sglang.launch_server` on a free port of 127.0.0.1 and return once `/health` answers 200.

    The server runs in a session of its own, and the kernel stops it when the calling thread ends without having
    stopped it, a SIGKILL included: call this from a thread that outlives the server.

    Args:
        arguments: the server's flags, without `--host` and `--port`.
        log: file for its stdout and stderr (overwritten).
        environment: variables on top of this process's.
        timeout: seconds until it must answer.
    Raises:
        ServerError: it ended or did not answer in time; nothing of it is left running. One that ended because a port was
            taken (SGLang chooses some that another server may take before it listens) is started again, twice.
    """
    retries = _PORT_RETRIES
    while True:
        try:
            return _start_once(arguments, Path(log), environment, timeout)
        except ServerError as error:
            if not retries or _PORT_TAKEN not in str(error):
                raise
            retries -= 1


def _start_once(arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None, timeout: float) -> Server:
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    with log.open("wb") as stream:
        stream.write(("$ " + " ".join(command) + "\n").encode())
        stream.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    _groups.add(process.pid)  # it leads a session of its own
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_healthy(server, timeout)
    except BaseException:
        server.stop()
        raise
    return server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_healthy(server: Server, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        status = server.process.poll()
        if status is not None:
            raise ServerError(f"the server ended with status {status}; the end of {server.log}:\n{server.log_tail()}")
        try:
            # SGLang's /health generates a token, so a 200 means that requests are served.
            with urllib.request.urlopen(server.url + "/health", timeout=30):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise ServerError(
        f"the server did not answer within {timeout:.0f} s; the end of {server.log}:\n{server.log_tail()}"
    )


def _group_runs(process: subprocess.Popen) -> bool:
    process.poll()  # Reaps the leader.
    for member in psutil.process_iter(["status"]):
        try:
            if os.getpgid(member.pid) == process.pid and member.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except ProcessLookupError:
            pass
    return False

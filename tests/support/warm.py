"""A Python that starts in no time: tests run programs by it as by `sys.executable`, in processes of their own.

Most of a short program's time is the import of torch, transformers, open_clip and matplotlib. A server imports them once
(`IMPORTED`; nothing of this project), when the first program comes, and forks for each program. All workers of pytest-xdist
have the controller's server (`share`, called by tests/conftest.py). `python()` is the path of a stub for `sys.executable`:

    subprocess.run([warm.python(), "-m", "training.main", ...], cwd=..., env=..., capture_output=True)

The stub hands its command line, folder, environment and standard streams to the server, passes signals on to the forked
process, and ends as that ends; if it is killed, so is the process. A torchrun that it runs takes it for its ranks. Not for
tests of the time of imports, of variables that those libraries read at import, or of a session's or parent's end: the process
is the server's child.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

IMPORTED = (
    "torch", "torch.distributed.run", "torchvision", "timm", "transformers", "open_clip", "open_clip_train.main", "pandas",
    "matplotlib.figure", "matplotlib.backends.backend_agg",
)  # fmt: skip
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


# ---------------------------------------------------------------------------------------------------------------------
# In the tests' process
# ---------------------------------------------------------------------------------------------------------------------

_python: str | None = None


def share(stub: str) -> None:
    """Use the server that another process has started, and with which it ends, by its stub's path."""
    global _python
    _python = stub


def python() -> str:
    """Return the stub's path, and start the server at the first call, unless WARM_PYTHON names one."""
    global _python
    _python = _python or os.environ.get("WARM_PYTHON")
    if _python is None:
        import subprocess
        import tempfile

        # A socket's address has 107 bytes at most.
        folder = tempfile.mkdtemp(
            prefix="warm-python-", dir=None if len(tempfile.gettempdir()) < 70 else "/tmp"
        )
        listener = socket.socket(socket.AF_UNIX)
        address = os.path.join(folder, "socket")
        listener.bind(address)
        listener.listen(64)  # programs call before the imports are done
        fd = listener.fileno()
        _python = os.path.join(folder, "python")
        command = [sys.executable, os.path.abspath(__file__), "serve", str(fd), _python]
        environment = {
            **os.environ,
            "HF_HOME": os.path.join(folder, "empty"),
            "HF_HUB_OFFLINE": "1",
        }
        server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[fd], env=environment)
        listener.close()
        atexit.register(_end, os.getpid(), server, folder)
        with open(_python, "w", encoding="utf-8") as script:
            script.write(
                f'#!/bin/sh\nexec "{sys.executable}" -IS "{os.path.abspath(__file__)}" run "{address}" "$@"\n'
            )
        os.chmod(_python, 0o755)
    return _python


def _end(owner: int, server: Any, folder: str) -> None:
    import subprocess

    if os.getpid() == owner:  # and not a process that a test has forked
        server.stdin.close()  # so that it ends its programs too
        try:
            server.wait(timeout=2)
        except subprocess.TimeoutExpired:  # in its imports
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# The stub, which imports the standard library alone
# ---------------------------------------------------------------------------------------------------------------------


def call(address: str, arguments: list[str]) -> int:
    """Have the server run a command line, and end as it ends."""
    request = {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    data = json.dumps(request).encode()
    socket.send_fds(server, [struct.pack("!I", len(data))], [0, 1, 2])
    server.sendall(data)
    for number in SIGNALS:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    answer = _exactly(server, 4)
    if len(answer) < 4:
        print("the server that should run this has ended", file=sys.stderr)
        return 70
    (status,) = struct.unpack("!i", answer)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _exactly(connection: socket.socket, length: int) -> bytes:
    """This number of bytes, or fewer if the other side ends."""
    data = b""
    while len(data) < length and (piece := connection.recv(length - len(data))):
        data += piece
    return data


# ---------------------------------------------------------------------------------------------------------------------
# The server
# ---------------------------------------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> dict | None:
    """Fork for each request. Returns None in the server when its standard input ends, and the request in a forked process."""
    children: dict[int, socket.socket] = {}
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    while True:
        ready, _, _ = select.select([0, listener, wake_read, *children.values()], [], [])
        if 0 in ready:  # nothing is ever written to it: the tests have ended
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return None
        if wake_read in ready:
            os.read(wake_read, 4096)
            for pid in list(children):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    connection = children.pop(pid)
                    with contextlib.suppress(OSError):  # the stub was killed
                        connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
                    connection.close()
        for pid, connection in list(children.items()):
            if connection in ready:
                numbers = b""
                with contextlib.suppress(ConnectionError):
                    numbers = connection.recv(64)
                for number in numbers or [signal.SIGKILL]:  # without its stub it ends too
                    os.kill(pid, number)
        if listener in ready:
            connection, _ = listener.accept()
            head, fds, _, _ = socket.recv_fds(connection, 4, 3)
            request = json.loads(_exactly(connection, struct.unpack("!I", head)[0]))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                for opened in (*fds, wake_read, wake_write):
                    os.close(opened)
                for opened in (listener, connection, *children.values()):
                    opened.close()
                return request
            for fd in fds:
                os.close(fd)
            children[pid] = connection


def become(request: dict, base: list[str], python: str) -> None:
    """Make this process what Python would be after it has read this command line, and run the program.

    Args:
        base: `sys.path` without PYTHONPATH and the program's folder.
        python: the stub's path.
    """
    import runpy

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"], PYTHON_EXEC=python)  # by which torchrun starts its ranks
    arguments = request["arguments"]
    if arguments[0] == "-u":
        arguments = arguments[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if arguments[0] == "-m":
        sys.argv, sys.path[:] = arguments[1:], [os.getcwd(), *given, *base]
        runpy._run_module_as_main(arguments[1], alter_argv=True)  # type: ignore[attr-defined]  # as Python itself does
        return
    if arguments[0] == "-c":
        sys.argv, sys.path[:] = ["-c", *arguments[2:]], ["", *given, *base]
        code = compile(arguments[1], "<string>", "exec")
    elif arguments[0].startswith("-"):
        raise SystemExit(f"a warm Python takes -u, -m, -c and files, got {arguments[0]}")
    else:
        file = arguments[0]
        sys.argv, sys.path[:] = arguments, [os.path.dirname(os.path.abspath(file)), *given, *base]
        main.__file__ = file
        with open(file, "rb") as source:
            code = compile(source.read(), file, "exec")
    exec(code, main.__dict__)


def end(program: Callable[[], None]) -> None:
    """Run a program and end as Python does, but for the teardown of its modules, which takes seconds in a forked process."""
    import threading
    import traceback

    status: Any = 0
    try:
        program()
    except SystemExit as stop:
        status = stop.code
        if not isinstance(status, int | None):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        traceback.print_exc()
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # a closed stream
        sys.stdout.flush()
        sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((status or 0) & 0xFF)


def main() -> int:
    if sys.argv[1] == "run":
        return call(sys.argv[2], sys.argv[3:])
    import importlib
    import subprocess

    del sys.path[0]  # this folder
    without = [sys.executable, "-E", "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    base = json.loads(subprocess.run(without, capture_output=True, check=True).stdout)
    # Ctrl-C in the tests' terminal: our standard input ends then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[2]))
    ready, _, _ = select.select([0, listener], [], [])
    if 0 in ready:  # no test had a program
        return 0
    for name in IMPORTED:
        importlib.import_module(name)
    request = serve(listener)
    if request is not None:
        end(lambda: become(request, base, sys.argv[3]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

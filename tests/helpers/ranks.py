"""Processes of one run, started as torchrun starts them, or by torchrun itself."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
HELD: list[socket.socket] = []  # until the tests end


def make_environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    plain = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": path}
    return os.environ | plain | more


def hold_port() -> str:
    """A port that is kept for rank 0, which shares it (SO_REUSEADDR), and for nobody else.

    On a busy machine a rank needs many seconds to get to its port. One that was only looked up may
    be another run's by then, and the ranks of both would find each other's addresses there.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    HELD.append(held)
    return str(held.getsockname()[1])


def start_ranks(count: int, arguments: list[str], **more: str) -> list[subprocess.Popen[str]]:
    """``python …`` as ranks 0 to count - 1; each one's exit code is its own."""
    port = hold_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=make_environment(**place, RANK=str(rank), LOCAL_RANK=str(rank), **more),
        )
        for rank in range(count)
    ]


def finish_ranks(ranks: list[subprocess.Popen[str]], timeout: float) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of every rank; none outlives this."""
    end = time.monotonic() + timeout
    found = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=max(end - time.monotonic(), 0.1))
            found.append((rank.returncode, out, err))
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
                rank.communicate()
    return found


def start_torchrun(arguments: list[str], log: Path, **more: str) -> subprocess.Popen[bytes]:
    """``torchrun --standalone --nproc-per-node 2 …``, what it prints in ``log``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with log.open("wb") as out:
        return subprocess.Popen(
            [*command, "--nproc-per-node", "2", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=make_environment(**more),
        )


def list_children(pid: int) -> list[int]:
    """The processes that a process started, oldest first."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return sorted(int(child) for child in text.split())


def kill_all(started: subprocess.Popen[bytes]) -> None:
    """End a torchrun of ours and what it started."""
    for child in list_children(started.pid) if started.poll() is None else []:
        os.kill(child, signal.SIGKILL)
    if started.poll() is None:
        started.kill()
    started.wait()

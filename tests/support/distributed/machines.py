"""Machines made of Linux namespaces: each has its own address, processes, `/tmp`, `/dev/shm`, home and host name.

They share the files of this computer; the checkout and Python can only be read. One Ethernet bridge connects them, in a
namespace of its own, so nothing changes in this computer's network. All is gone when the thread that made the machines
ends, however it ends. No process of a machine sees or reaches one outside: `ray stop` on a machine stops what runs
there and nothing else.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.processes import wait_until

ROOT = Path(__file__).parents[3]
NETWORK = "10.77.0"
BRIDGE = "bridge0"
USER = "ubuntu"
HOME = Path("/home/ubuntu")
PRIVATE = {"/tmp": "16g", "/dev/shm": "8g", "/run": "64m", "/home": "4g"}
"""Folders of which each machine has its own, empty at first, and their sizes."""
NAMESPACES = ("--net", "--pid", "--mount", "--uts", "--ipc")
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOLS = {"ip": "iproute2", "setpriv": "util-linux", "unshare": "util-linux", "nsenter": "util-linux"}
SSH_TOOLS = {"ssh": "openssh-client"}
SSH_SERVER = f"{sys.executable} -m tests.support.distributed.ssh.server"
"""In the place of OpenSSH's, where that is not installed."""
STAND_INS = "/usr/local/sbin"
"""Where machines find `rsync`, if this computer has none."""
OWN = ("ps -eo pid", "/usr/sbin/sshd ", "sshd:", SSH_SERVER, "sleep infinity")
"""Beginnings of the command lines of a machine's own processes."""
SWITCH = f"ip link add {BRIDGE} type bridge; ip link set {BRIDGE} up; echo ready; read -r _; sleep infinity; true"
SSHD_CONFIG = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
MaxStartups 100
"""


def missing(*, ssh: bool = False) -> str:
    """Return why machines, with *ssh* those with an ssh server, cannot be made here; empty if they can."""
    tools = TOOLS | (SSH_TOOLS if ssh else {})
    lacking = sorted({package for tool, package in tools.items() if not _is_installed(tool)})
    if lacking:
        return f"machines made of namespaces need Debian's {', '.join(lacking)}"
    if os.geteuid() != 0:
        return "machines made of namespaces need root"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False)
    return f"machines made of namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class Machine:
    """One machine.

    Attributes:
        name: its host name.
        address: its IPv4 address.
        init: its first process, by this computer's numbers; all others end with it.
        switch: the first process of the namespace that holds the bridge.
        environment: variables of the commands that run here.
    """

    name: str
    address: str
    init: int
    switch: int
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *words: object) -> list[str]:
        """Return the command that runs *words* on this machine, in its home."""
        variables = {"PATH": PATH, "HOME": str(HOME), "USER": USER, "LANG": "C.UTF-8"} | self.environment
        inside = ["nsenter", "-t", str(self.init), "-n", "-p", "-m", "-u", "-i", "env", "-i", "-C", str(HOME)]
        return [*inside, *(f"{name}={value}" for name, value in variables.items()), *map(str, words)]

    def run(self, *words: object, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command; return its status and as `stdout` all that it printed."""
        with self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                printed, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(words, process.returncode, printed)

    def output(self, *words: object, timeout: float = 120.0) -> str:
        """Run a command that must succeed; return what it printed."""
        ran = self.run(*words, timeout=timeout)
        assert ran.returncode == 0, f"on {self.name}, {' '.join(map(str, words))}: {ran.returncode}\n{ran.stdout}"
        return ran.stdout

    def start(self, *words: object, **options: Any) -> subprocess.Popen[Any]:
        """Start a command; it is killed when the calling thread ends."""
        return subprocess.Popen([*DIES_WITH_US, *self.command(*words)], stdin=subprocess.DEVNULL, **options)

    def processes(self) -> dict[int, str]:
        """Return the command lines of what runs here by process id, without what makes up the machine."""
        lines = (line.split(maxsplit=1) for line in self.output("ps", "-eo", "pid=,args=").splitlines())
        return {int(pid): args for pid, args in lines if pid != "1" and not args.startswith(OWN)}

    def cut(self) -> None:
        """Pull the network cable: packets are lost, and nobody is told."""
        self._cable("down")

    def join(self) -> None:
        """Put the cable back."""
        self._cable("up")

    def lose_power(self) -> None:
        """End all processes at once without a packet: what was connected to this machine hears nothing. `join` ends it.

        The machine itself stays, empty as after a start.
        """
        self.cut()
        while left := self.processes():  # they may start others meanwhile
            self.run("kill", "-9", *left)

    def switch_off(self) -> None:
        """End all processes at once, as a loss of power would."""
        os.kill(self.init, signal.SIGKILL)

    def _cable(self, state: str) -> None:
        subprocess.run([*_in_network(self.switch), "ip", "link", "set", self.name, state], check=True)


@contextmanager
def machines(*names: str, folder: Path, ssh: bool = False) -> Iterator[list[Machine]]:
    """Yield a machine of each of *names* (at most 13 letters); they are gone afterwards.

    Args:
        names: their host names; the address of the n-th, from 1, is 10.77.0.(10 + n).
        folder: an empty folder for keys, logs and settings, which the machines see as well.
        ssh: with an ssh server each, which lets the users `root` and `ubuntu` in with the key `folder/key`.
    """
    addresses = {name: f"{NETWORK}.{10 + number}" for number, name in enumerate(names, start=1)}
    _write_settings(folder, addresses, ssh)
    with ExitStack() as ending:
        switch = Namespace(ending, folder / "switch.log", ("--net", "--pid"), SWITCH)
        switch.go_on()
        made = []
        for name, address in addresses.items():
            script = _script(name, address, folder, ssh)
            inside = Namespace(ending, folder / f"{name}.log", (*NAMESPACES, "--mount-proc"), script)
            _connect(name, address, inside.init, switch.init)
            inside.go_on()
            made.append(Machine(name, address, inside.init, switch.init))
        if ssh:
            wait_until(lambda: all(_listens(each) for each in made), 30, "ssh servers")
        yield made


class Namespace:
    """The first process of new namespaces; they end with it, and it is killed when the calling thread ends.

    Args:
        ending: ends it.
        log: the file of what it prints.
        kinds: options of `unshare`.
        script: what it runs: it prints "ready", reads a line, and goes on.
    """

    def __init__(self, ending: ExitStack, log: Path, kinds: Sequence[str], script: str) -> None:
        command = [*DIES_WITH_US, "unshare", *kinds, "--fork", "--kill-child", "bash", "-ec", script]
        with log.open("wb") as errors:
            self._started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        ending.callback(self._end)
        assert self._started.stdout is not None
        assert self._started.stdout.readline() == b"ready\n", log.read_text()
        pid = self._started.pid
        self.init = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def go_on(self) -> None:
        assert self._started.stdin is not None
        self._started.stdin.write(b"\n")
        self._started.stdin.flush()

    def _end(self) -> None:
        with self._started as process:
            process.kill()


def _connect(name: str, address: str, init: int, switch: int) -> None:
    """Give a machine its cable to the bridge, and its address."""
    ours, theirs = _in_network(switch), _in_network(init)
    for command in (
        [*ours, "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(init)],
        [*ours, "ip", "link", "set", name, "master", BRIDGE, "up"],
        [*theirs, "ip", "address", "add", f"{address}/24", "dev", "eth0"],
        [*theirs, "ip", "link", "set", "lo", "up"],
        [*theirs, "ip", "link", "set", "eth0", "up"],
        [*theirs, "ip", "route", "add", "default", "dev", "eth0"],  # Ray finds the address by the default route
    ):
        subprocess.run(command, check=True)


def _in_network(init: int) -> list[str]:
    return ["nsenter", "-t", str(init), "-n"]


def _listens(machine: Machine) -> bool:
    return machine.run("bash", "-c", f"exec 3<>/dev/tcp/{machine.address}/22").returncode == 0


def _script(name: str, address: str, folder: Path, ssh: bool) -> str:
    """Return what a machine's first process runs. /mnt holds what it sees while private folders are laid over it."""
    seen = dict(enumerate((folder, ROOT, Path(sys.prefix), Path(sys.base_prefix))))
    server = f"/usr/sbin/sshd -D -e -f {folder}/sshd_config -o ListenAddress={address}"
    if not _is_installed("sshd"):
        server = f"env -C {ROOT} HOME={HOME} {SSH_SERVER} {folder} {address}"
    lines = [
        "mount --make-rprivate /",
        "mount -t tmpfs tmpfs /mnt",
        *(f"mkdir /mnt/{number}; mount --bind {path} /mnt/{number}" for number, path in seen.items()),
        *(f"mount -t tmpfs -o size={size} tmpfs {path}" for path, size in PRIVATE.items()),
        *(f"mkdir -p {path}; mount --move /mnt/{number} {path}" for number, path in seen.items()),
        *(f"mount -o remount,bind,ro {path}" for path in list(seen.values())[1:]),
        "umount /mnt",
        "chmod 1777 /tmp /dev/shm",
        f"mkdir -p /run/sshd {HOME}",
        *(f"mount --bind {folder}/{file} /etc/{file}" for file in ("passwd", "hosts")),
        *([f"mount --bind {folder}/stand_ins {STAND_INS}"] if ssh and not _is_installed("rsync") else []),
        f"hostname {name}",
        "echo ready; read -r _",
        f"{server if ssh else 'sleep infinity'}; true",  # `true`: the shell stays, and collects processes left to it
    ]
    return "\n".join(lines)


def _write_settings(folder: Path, addresses: Mapping[str, str], ssh: bool) -> None:
    """Write the list of users, where `root` and `ubuntu` are the same one with a private home, the list of hosts, and
    ssh's files.

    Torch asks for the names of the addresses that it connects to. Without an answer, that takes ten seconds each time.
    """
    hosts = {"localhost": "127.0.0.1", **addresses}
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
    others = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith(("root:", USER))]
    users = [f"{name}:x:0:0::{HOME}:/bin/bash" for name in ("root", USER)]
    (folder / "passwd").write_text("\n".join([*users, *others]) + "\n")
    if not ssh:
        return
    for key in ("key", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
    stand_in = folder / "stand_ins" / "rsync"
    stand_in.parent.mkdir()
    stand_in.write_text(f"#!{sys.executable}\n{(ROOT / 'tests/support/distributed/ssh/rsync.py').read_text()}")
    stand_in.chmod(0o755)


def _is_installed(tool: str) -> bool:
    return shutil.which(tool, path=PATH) is not None

"""A network whose links have the rate that a benchmark asks for, inside one machine.

Every node is a network namespace with one interface, `eth0`, joined by veth to a bridge in a namespace of its own; a
token bucket (`tc ... tbf`) holds what each node sends to the rate. Ranks of one node share its link to the others, and
talk to each other over the node's loopback, which is shaped too: 10 times that rate for each of them.

Nothing outside the namespaces is touched, and no packet leaves them. They have no names: they live by this process's
file descriptors and by the ranks inside, so the kernel removes them, with all that is in them, when those end, however
they end. A killed benchmark leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusedcomm.bench.errors import BenchError

INTERFACE = "eth0"
# A rank's link to others of its node, against the node's link.
_FASTER_INSIDE = 10
_CLONE_NEWNET = 0x40000000
_THIS_NAMESPACE = "/proc/thread-self/ns/net"
_LOOPBACK_REMEDY = "or take --link loopback, which shapes nothing"
# Jumbo frames: headers take less than 1 % of the rate, so that payload divided by rate is the time on the wire.
_MTU = 9000
# The bucket must hold a whole segment of TCP's offload (64 KiB), or the kernel cuts it, at the price of CPU time ...
_MIN_BURST_BYTES = 128 * 1024
# ... and what the link can send while the kernel's timer sleeps.
_MIN_BURST_S = 0.2e-3
# A full queue drops packets, and a lost last packet is noticed only by a time-out of 0.2 s or more.
_QUEUE_BYTES = 256 * 2**20
_SYSCTLS = {
    "net/ipv6/conf/all/disable_ipv6": "1",
    # The same on every machine; bbr and cubic probe, and so never send the same way twice.
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
}


class ShapedNetwork:
    """`num_nodes` nodes, each of which sends at `gbps`; a context manager, and `close()` may come early.

    `ranks_per_node` share a node's link, and may each send at 10 times its rate to one another.

    Made, used and closed by one thread. Raises BenchError: the rate is not a rate, this process may not make
    namespaces, or `ip` and `tc` are missing.
    """

    def __init__(self, num_nodes: int, gbps: float, ranks_per_node: int = 1) -> None:
        check_rate(gbps)
        self._ranks_per_node = ranks_per_node
        self._ip, self._tc = _tool("ip"), _tool("tc")
        self._bridge = -1
        self._nodes: list[int] = []
        try:
            self._bridge = _new_namespace()
            self._run_in(self._bridge, self._ip, "link add bridge type bridge stp_state 0 mcast_snooping 0")
            self._run_in(self._bridge, self._ip, "link set bridge up")
            for node in range(num_nodes):
                self._nodes.append(_new_namespace())
                self._join(node)
            self.set_rate(gbps)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShapedNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def namespace(self, node: int) -> str:
        """A path to the node's namespace for `enter_namespace`, in any process while this one lives."""
        return _path_of(self._nodes[node])

    def set_rate(self, gbps: float) -> None:
        """Change every node's rate; what is on its way goes on."""
        check_rate(gbps)
        for namespace in self._nodes:
            self._shape(namespace, INTERFACE, gbps)
            if self._ranks_per_node > 1:
                self._shape(namespace, "lo", gbps * _FASTER_INSIDE * self._ranks_per_node)

    def sent_bytes(self) -> list[int]:
        """What each node has sent since the start, headers included, counted where it enters the bridge."""
        with _inside(self._bridge):
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        # "port0: <bytes received> <packets received> ..."
        counts = {name.strip(): int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[2:])}
        return [counts[f"port{node}"] for node in range(len(self._nodes))]

    def close(self) -> None:
        """Let go of the namespaces; they end with the last process inside."""
        while self._nodes:
            os.close(self._nodes.pop())
        if self._bridge >= 0:
            os.close(self._bridge)
            self._bridge = -1

    def _shape(self, namespace: int, interface: str, gbps: float) -> None:
        burst = max(_MIN_BURST_BYTES, math.ceil(gbps * 1e9 / 8 * _MIN_BURST_S))
        bucket = f"tbf rate {round(gbps * 1e9)}bit burst {burst} limit {_QUEUE_BYTES}"
        self._run_in(namespace, self._tc, f"qdisc replace dev {interface} root {bucket}")

    def _join(self, node: int) -> None:
        namespace, port = self._nodes[node], f"port{node}"
        self._run_in(
            namespace,
            self._ip,
            f"link add {INTERFACE} mtu {_MTU} type veth peer name {port} mtu {_MTU} netns {_path_of(self._bridge)}",
        )
        with _inside(namespace):
            for name, value in _SYSCTLS.items():
                path = Path("/proc/sys") / name
                # A kernel without IPv6 has nothing to switch off.
                if path.exists():
                    path.write_text(value)
        # 10.0.0.1, 10.0.0.2, ...: nobody else is in these namespaces.
        self._run_in(namespace, self._ip, f"address add 10.0.{(node + 1) // 256}.{(node + 1) % 256}/16 dev {INTERFACE}")
        self._run_in(namespace, self._ip, f"link set {INTERFACE} up")
        self._run_in(namespace, self._ip, "link set lo up")
        self._run_in(self._bridge, self._ip, f"link set {port} master bridge up")

    def _run_in(self, namespace: int, tool: str, arguments: str) -> None:
        with _inside(namespace):
            done = subprocess.run([tool, *arguments.split()], capture_output=True, text=True)
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise BenchError(
                f"shaped network: `{Path(tool).name} {arguments}` failed: {said}; "
                f"this kernel may lack veth, bridge or tbf: use another machine, {_LOOPBACK_REMEDY}"
            )


def enter_namespace(path: str) -> None:
    """Move the calling thread, and every thread and process that it starts later, into the namespace."""
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(namespace)
    finally:
        os.close(namespace)


def check_rate(gbps: float) -> None:
    """BenchError unless something can travel at that rate."""
    # tc counts in bits per second.
    if not (math.isfinite(gbps) and gbps * 1e9 >= 1000):
        raise BenchError(
            f"shaped network: a link of {gbps:g} Gbit/s carries nothing; give a rate above 0, such as --link 1"
        )


def _tool(name: str) -> str:
    # Both live in sbin, which is not on every user's path.
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if found is None:
        raise BenchError(
            f"shaped network: the command `{name}` is not installed; install the package iproute2 "
            f"(apt-get install iproute2), {_LOOPBACK_REMEDY}"
        )
    return found


def _path_of(namespace: int) -> str:
    return f"/proc/{os.getpid()}/fd/{namespace}"


def _new_namespace() -> int:
    """A file descriptor that keeps a new network namespace alive."""
    if sys.platform != "linux":
        raise BenchError(f"shaped network: network namespaces need Linux, not {sys.platform}; {_LOOPBACK_REMEDY}")
    with _returning_home():
        _libc_call("unshare", _CLONE_NEWNET)
        return os.open(_THIS_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def _inside(namespace: int) -> Iterator[None]:
    """The block runs in the namespace, and so do the processes that it starts."""
    with _returning_home():
        _set_namespace(namespace)
        yield


@contextmanager
def _returning_home() -> Iterator[None]:
    home = os.open(_THIS_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        try:
            _set_namespace(home)
        finally:
            os.close(home)


def _set_namespace(namespace: int) -> None:
    _libc_call("setns", namespace, _CLONE_NEWNET)


def _libc_call(name: str, *arguments: int) -> None:
    # Python has these two since 3.12.
    function: Callable[..., Any] = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EPERM:
        raise BenchError(
            f"shaped network: making network namespaces needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN); "
            f"run as root, {_LOOPBACK_REMEDY}"
        )
    raise BenchError(f"shaped network: {name}: {os.strerror(code)}; use another machine, {_LOOPBACK_REMEDY}")

"""Benchmarks: links are really shaped and really gone afterwards; results are checked."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch_driver import wait_until_session_ended

from fusedcomm.bench import harness, shaped_network
from fusedcomm.bench.errors import BenchError
from fusedcomm.bench.ranks import RankError, Ranks, RankState, Seat, cores_of
from fusedcomm.bench.report import markdown, read_json, summary
from fusedcomm.bench.request import OPS, Request
from fusedcomm.bench.shaped_network import INTERFACE, ShapedNetwork, enter_namespace

_ROOT = Path(__file__).parent.parent
# What a machine may lack; anything else that goes wrong is a mistake of ours.
LACKS = ("needs root", "is not installed", "needs Linux", "Operation not supported", "Unknown device type")


@pytest.fixture(scope="module")
def network_works() -> None:
    try:
        ShapedNetwork(1, 1.0).close()
    except BenchError as error:
        if any(words in str(error) for words in LACKS):
            pytest.skip(str(error))
        raise


@pytest.fixture
def network(network_works):
    with ShapedNetwork(2, 0.2) as made:
        yield made


def _send(network: ShapedNetwork, num_bytes: int) -> float:
    """Seconds from the first byte sent by node 0 to the last one received by node 1."""
    listening = threading.Event()
    stamps = []

    def receive():
        enter_namespace(network.namespace(1))
        with socket.create_server(("10.0.0.2", 5000)) as server:
            listening.set()
            connection, _ = server.accept()
            with connection:
                while connection.recv(1 << 20):
                    pass
        stamps.append(time.perf_counter())

    def send():
        enter_namespace(network.namespace(0))
        with socket.create_connection(("10.0.0.2", 5000)) as connection:
            stamps.append(time.perf_counter())
            connection.sendall(bytes(num_bytes))

    # Namespaces are per thread, and these two end with theirs.
    threads = [threading.Thread(target=task) for task in (receive, send)]
    threads[0].start()
    assert listening.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    return stamps[1] - stamps[0]


@pytest.mark.parametrize("gbps", [0.2, 0.8])
def test_links_have_the_rate_that_was_asked_for(network, gbps):
    # The second one without building anew.
    network.set_rate(gbps)
    num_bytes = round(gbps * 1e9 / 8 * 0.3)
    before = network.sent_bytes()
    times_s = [_send(network, num_bytes) for _ in range(3)]
    sent, answered = (after - start for after, start in zip(network.sent_bytes(), before))
    # The bucket is full at first: so much leaves at once.
    expected_s = (num_bytes - shaped_network._MIN_BURST_BYTES) * 8 / (gbps * 1e9)
    assert all(seconds > 0.99 * expected_s for seconds in times_s)
    # Others may use this machine as well.
    assert min(times_s) < 1.08 * expected_s
    assert 3 * num_bytes < sent < 3.03 * num_bytes
    # Acknowledgements alone.
    assert answered < 0.03 * num_bytes


def _users_of(inodes: set[int]) -> list[str]:
    """Who still holds one of these namespaces: processes, or file descriptors."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "ns" / "net", *(process / "fd").iterdir()]
        except OSError:
            continue
        for link in links:
            try:
                if link.stat().st_ino in inodes and "net:[" in os.readlink(link):
                    found.append(str(link))
            except OSError:
                continue
    return found


def _interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


@pytest.mark.usefixtures("network_works")
def test_nothing_is_left_of_a_network():
    home, interfaces = os.stat("/proc/thread-self/ns/net").st_ino, _interfaces()
    with ShapedNetwork(3, 1.0) as network:
        inodes = {os.stat(network.namespace(node)).st_ino for node in range(3)}
        assert _interfaces() == interfaces
        assert len(inodes) == 3
        assert len(_users_of(inodes)) == 3
    assert _users_of(inodes) == []
    assert os.stat("/proc/thread-self/ns/net").st_ino == home


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fusedcomm", "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        start_new_session=True,
    )


def _session_namespaces(leader: int) -> set[int]:
    """Namespaces of the processes of a session, other than this one's."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == leader:
                found.add((process / "ns" / "net").stat().st_ino)
        except OSError:
            continue
    return found - {os.stat("/proc/self/ns/net").st_ino}


@pytest.mark.usefixtures("network_works")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_an_interrupted_benchmark(number):
    # At this rate the first check alone takes minutes.
    process = _start("all_gather_matmul", "--link", "0.001", "--shape", "1024,1024,1024")
    try:
        assert "links of 0.001 Gbit/s" in process.stdout.readline(), process.stderr.read()
        time.sleep(0.5)
        inodes = _session_namespaces(process.pid)
        assert len(inodes) == 2
        if number == signal.SIGINT:
            # As a terminal does: to all of its processes.
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    wait_until_session_ended(process.pid)
    assert _users_of(inodes) == []
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGINT:
        assert errors == "fusedcomm: SIGINT: all ranks ended\n"


def _exchange(state: RankState, peer_of: list[int], num_bytes: int) -> None:
    out, into = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    peer = peer_of[state.rank]
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]):
        work.wait()


def test_ranks_of_one_node_share_its_link(network):
    seats = [Seat(core, INTERFACE, network.namespace(rank // 2)) for rank, core in enumerate(cores_of(4))]
    num_bytes = 1_000_000
    with Ranks(seats) as ranks:
        # 0 and 1 are one node, 2 and 3 the other: neighbours do not use the link ...
        before = network.sent_bytes()
        ranks.run(_exchange, [1, 0, 3, 2], num_bytes)
        between = network.sent_bytes()
        assert all(after - start < 0.02 * num_bytes for after, start in zip(between, before))
        # ... and both ranks of a node send over it.
        ranks.run(_exchange, [2, 3, 0, 1], num_bytes)
        sent = [after - start for after, start in zip(network.sent_bytes(), between)]
        assert all(2 * num_bytes < count < 2.05 * num_bytes for count in sent)


def _fail_on_rank_1(state: RankState) -> None:
    if state.rank == 1:
        raise ValueError("out of luck")
    time.sleep(600)


def _die_on_rank_1(state: RankState) -> None:
    if state.rank == 1:
        os._exit(3)
    time.sleep(600)


@pytest.mark.parametrize(
    ("task", "words"), [(_fail_on_rank_1, "out of luck"), (_die_on_rank_1, "rank 1 died with exit code 3")]
)
def test_a_rank_that_fails_ends_the_others(task, words):
    with pytest.raises(RankError, match=words), Ranks([Seat(None, "lo", None)] * 2) as ranks:
        ranks.run(task)


METHODS_OF_GRADIENTS = ("ddp", "ddp_best", "serial", "backward", "backward+forward")
_TINY = {
    "all_gather_matmul": "64,32,48",
    "matmul_reduce_scatter": "64,32,48",
    "matmul_all_reduce": "64,32,48",
    "all_reduce": "1,32,48",
    "mlp": "64,32,48",
    "attention": "64,64,48",
    "gradients": "32,16,24",
    "train_step": "128,32,128",
}


@pytest.mark.parametrize("op", OPS)
def test_every_method_of_every_op_is_right(op, tmp_path, capsys):
    path = tmp_path / "rows.json"
    world = 4 if op == "train_step" else 2
    code = harness.run(Request(op, world, "loopback", "fp32", _TINY[op], None, 3, path))
    assert code == 0, capsys.readouterr().out
    rows = json.loads(path.read_text())
    methods = [row["method"] for row in rows]
    needed = {"all_reduce": {"torch", "auto", "tree", "hierarchical"}, "gradients": {*METHODS_OF_GRADIENTS}}
    assert needed.get(op, {"torch", "auto", "serial", "chunked"}) <= set(methods)
    assert ("dtensor" in methods) == (op in ("mlp", "attention"))
    for row in rows:
        assert (row["op"], row["world"], row["dtype"]) == (op, world, "fp32")
        assert row["checked"] is True
        assert row["link_gbps"] is None
        assert 0 < row["p25_s"] <= row["median_s"] <= row["p75_s"]
        assert row["of_ideal"] == pytest.approx(max(row["gemm_s"], row["wire_s"]) / row["median_s"])
        assert (row["vs_serial"] is None) == (op == "all_reduce")
        assert row["vs_torch"] > 0


def test_what_travels_in_the_next_forward_of_a_pipeline_is_right(tmp_path, capsys):
    path = tmp_path / "rows.json"
    methods = "torch,auto,backward+forward,zero1,fsdp"
    request = Request("train_step", 4, "loopback", "fp32", _TINY["train_step"], methods, 3, path, layout="2x2x1")
    assert harness.run(request) == 0, capsys.readouterr().out
    rows = {row["method"]: row for row in json.loads(path.read_text())}
    assert list(rows) == methods.split(",")
    assert all(row["checked"] and row["layout"] == "2x2x1" for row in rows.values())
    at_end = [name for name, row in rows.items() if "weight gradients at the end" in row["note"]]
    assert at_end == ["backward+forward"]


@pytest.mark.usefixtures("network_works")
def test_the_balanced_link_carries_the_bytes_in_the_time_of_the_gemm(tmp_path):
    json_path, plot_path = tmp_path / "rows.json", tmp_path / "plot.png"
    request = Request("matmul_reduce_scatter", 2, "balanced", "fp32", "512,256,512", None, 3, json_path, plot_path)
    assert harness.run(request) == 0
    rows = {row["method"]: row for row in json.loads(json_path.read_text())}
    own_bytes = 256 * 256 * 4
    for row in rows.values():
        assert row["wire_s"] == pytest.approx(own_bytes * 8 / (row["link_gbps"] * 1e9))
    # Headers and acknowledgements take the rest, and what a busy machine makes TCP send again.
    assert own_bytes < rows["serial"]["wire_bytes"] < 1.4 * own_bytes
    assert own_bytes < rows["chunked"]["wire_bytes"] < 1.4 * own_bytes
    # gloo's reduce-scatter is an all-reduce.
    assert 1.9 * own_bytes < rows["torch"]["wire_bytes"] < 2.6 * own_bytes
    assert plot_path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("network_works")
def test_ranks_of_a_node_share_its_link_and_by_levels_the_least_leaves_it(tmp_path):
    path = tmp_path / "rows.json"
    request = Request("all_reduce", 4, "0.5", "fp32", "1,256,512", "torch,hierarchical", 3, path, nodes=2)
    assert harness.run(request) == 0
    rows = {row["method"]: row for row in json.loads(path.read_text())}
    least_bytes = 256 * 512 * 4
    for row in rows.values():
        assert row["nodes"] == 2
        assert row["wire_s"] == pytest.approx(least_bytes * 8 / 0.5e9)
    # Headers, acknowledgements, and what a busy machine makes TCP send again.
    assert least_bytes < rows["hierarchical"]["wire_bytes"] < 1.2 * least_bytes
    # One edge of the ring leaves each node.
    assert 1.5 * least_bytes < rows["torch"]["wire_bytes"] < 1.8 * least_bytes


def test_the_tables_shown_are_those_of_the_committed_rows():
    results = _ROOT / "bench" / "results" / "cpu-shaped.json"
    rows = read_json(results)
    assert all(row.checked for row in rows)
    assert summary(rows) in (_ROOT / "README.md").read_text()
    assert results.with_suffix(".md").read_text() == markdown(rows) + "\n"

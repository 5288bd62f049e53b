"""Layouts on paper: predictions by hand and against what was measured, what a search returns, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fusedcomm import cli
from fusedcomm.bench.bench_train_step import config_of
from fusedcomm.bench.case import Spec
from fusedcomm.nn import layer_flops
from fusedcomm.plan import Cluster, LinkConfig, load_cluster, memory, predict, search
from fusedcomm.train.config import Config, ConfigError, load_config, parse_config
from fusedcomm.train.layout import validate_for_world

ROOT = Path(__file__).parent.parent
FAST = LinkConfig(gbyte_per_s=1e6, latency_us=1e-6)
# What a step's predicted time may miss of the measured one: the model knows nothing of cores that ranks share.
TOLERANCE = 0.2


def cluster_of(nodes: int, gpus: int, *, link: LinkConfig = FAST, **values: float) -> Cluster:
    given = {"memory_per_gpu": 80.0, "memory_gbyte_per_s": 1e9, "tflops_per_gpu": 1.0} | values
    return Cluster(node_count=nodes, gpu_per_node=gpus, in_node=FAST, across_nodes=link, **given)


def config_with(
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    *,
    pipeline: dict | None = None,
    data: dict | None = None,
    tensor: dict | None = None,
    train: dict | None = None,
    model: dict | None = None,
) -> Config:
    return parse_config(
        {
            "model": {"layers": 8, "hidden": 64, "heads": 4, "vocab_size": 256} | (model or {}),
            "data": {"seq_len": 32},
            "train": {"steps": 1, "global_batch": 16} | (train or {}),
            "parallel_config": {
                "tensor_parallel": {"size": tp} | (tensor or {}),
                "pipeline_parallel": {"depth": pp} | (pipeline or {}),
                "data_parallel": {"size": dp} | (data or {}),
            },
        }
    )


def compute_s(config: Config) -> float:
    """Of a whole step on one rank at 1 TFLOP/s."""
    flops = layer_flops(config.transformer())
    tokens = config.train.global_batch * config.data.seq_len
    return tokens * (config.model.layers * flops.layer + flops.head) / 1e12


def test_a_rank_alone_takes_its_flops_and_the_update():
    config = config_with()
    found = predict(config, cluster_of(1, 1, memory_gbyte_per_s=1.0))
    weights = memory.weights_of(config.transformer(), range(8), first=True, last=True, tp=1)
    assert found.step_s == pytest.approx(compute_s(config) + 28 * weights / 1e9)
    assert (found.idle, found.tensor_s, found.data_s) == (0, 0, 0)


def test_a_layer_has_its_overhead_in_every_micro_batch():
    few, many = (
        predict(config_with(pipeline={"micro_batches": count}), cluster_of(1, 1, overhead_us=300.0)) for count in (1, 4)
    )
    assert many.step_s - few.step_s == pytest.approx(3 * 8 * 300e-6)


@pytest.mark.parametrize("method", ["serial", "chunked", "auto", "fused"])
def test_tensor_parallel_transfers_add_what_does_not_hide(method):
    config = config_with(tp=2, tensor={"method": method, "save": "gathered"})
    gemms_s = compute_s(config) / 2
    # 4 transfers a layer in forward and 4 in backward, and one for the embedding and for the head each time, of half of
    # 512 x 64 numbers. Together they take two thirds of what the GEMMs take.
    whole_s = gemms_s * 2 / 3
    rate = 512 * 64 * 4 / 2 * (8 * 8 + 4) / whole_s
    found = predict(config, cluster_of(2, 1, link=LinkConfig(gbyte_per_s=rate / 1e9, latency_us=1e-6)))
    if method == "serial":
        assert found.tensor_s == pytest.approx(whole_s, rel=1e-4)
    else:
        assert 0 < found.tensor_s < 0.5 * whole_s
    assert found.step_s == pytest.approx(compute_s(config) / 2 + found.tensor_s, rel=1e-4)


def test_a_pipeline_idles_as_its_schedule_does():
    # A head of next to nothing leaves stages alike.
    model = {"vocab_size": 4, "hidden": 256}
    config = config_with(
        pp=4, pipeline={"micro_batches": 8, "schedule": "gpipe"}, model=model, train={"global_batch": 8}
    )
    found = predict(config, cluster_of(1, 4))
    assert found.idle == pytest.approx(3 / 11, abs=0.005)
    assert found.step_s == pytest.approx(compute_s(config) / 4 * 11 / 8, rel=0.01)


def test_activations_pass_between_nodes_more_slowly():
    config = config_with(pp=2, pipeline={"micro_batches": 4})
    slow = LinkConfig(gbyte_per_s=1e-3, latency_us=1.0)
    inside, across = (predict(config, cluster_of(*shape, link=slow)) for shape in ((1, 2), (2, 1)))
    assert across.step_s > 2 * inside.step_s


def test_gradients_that_take_long_are_waited_for():
    config = config_with(dp=2)
    weights = memory.weights_of(config.transformer(), range(8), first=True, last=True, tp=1)
    # At a pace at which gradients are not ready in short turn. All of them travel ten times as long as is computed.
    half_s = 1000 * compute_s(config) / 2
    link = LinkConfig(gbyte_per_s=4 * weights / (10 * half_s) / 1e9, latency_us=1e-6)
    plain, late, shared = (
        predict(
            config_with(dp=2, data=data, train={"clip_norm": None}), cluster_of(2, 1, link=link, tflops_per_gpu=1e-3)
        )
        for data in ({}, {"overlap": "backward+forward"}, {"mode": "zero1"})
    )
    # The first leaves after forward and one layer's part of backward.
    assert 9 * half_s < plain.data_s < 9.6 * half_s
    assert late.data_s < plain.data_s
    assert shared.data_s < plain.data_s
    assert shared.memory_gib < plain.memory_gib
    # Over a link without limits nothing is waited for.
    assert predict(config, cluster_of(2, 1, tflops_per_gpu=1e-3)).data_s < 1e-3 * half_s


def test_groups_side_by_side_share_their_nodes_link():
    cluster = cluster_of(2, 4, link=LinkConfig(gbyte_per_s=8.0, latency_us=1.0))
    assert cluster.links_of([0, 4]).across.bytes_per_s == pytest.approx(2e9)
    assert cluster.links_of([0, 2, 4, 6]).across.bytes_per_s == pytest.approx(4e9)
    assert cluster.links_of(range(8)).across.bytes_per_s == pytest.approx(8e9)


def committed_rows() -> list[dict]:
    rows = json.loads((ROOT / "bench" / "results" / "cpu-shaped.json").read_text())
    ours = ("serial", "auto", "backward+forward", "zero1")
    return [row for row in rows if row["op"] == "train_step" and row["method"] in ours]


def predicted_s(row: dict) -> float:
    """Of a row, given its link and the time of its computing alone."""
    layout = None if row["layout"] is None else tuple(map(int, row["layout"].split("x")))
    spec = Spec("train_step", row["world"], row["dtype"], *row["shape"], nodes=row["world"], layout=layout)
    config = config_of(spec, row["method"])
    # The rate at which the busiest stage computes for as long as was measured without transfers.
    alone = predict(_without_data_parallel(config), cluster_of(1, spec.world // _dp(config)))
    busy_s = alone.step_s * (1 - alone.idle) if _pp(config) > 1 else alone.step_s
    link = LinkConfig(gbyte_per_s=row["link_gbps"] / 8, latency_us=300.0)
    cluster = cluster_of(
        spec.world, 1, link=link, tflops_per_gpu=busy_s / row["gemm_s"], memory_gbyte_per_s=8.0, memory_per_gpu=4.0
    )
    return predict(config, cluster).step_s


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row['note']}-{row['method']}") for row in committed_rows()])
def test_predictions_are_near_what_was_measured(row):
    found_s, measured_s = predicted_s(row), row["median_s"]
    assert found_s == pytest.approx(measured_s, rel=TOLERANCE)
    line = f"| {measured_s * 1e3:.0f} | {found_s * 1e3:.0f} | {found_s / measured_s:.2f} |"
    assert line in (ROOT / "docs" / "training.md").read_text()


def _dp(config: Config) -> int:
    return config.parallel_config.data_parallel.size


def _pp(config: Config) -> int:
    return config.parallel_config.pipeline_parallel.depth


def _without_data_parallel(config: Config) -> Config:
    raw = config.model_dump()
    raw["parallel_config"]["data_parallel"]["size"] = 1
    raw["train"]["global_batch"] //= _dp(config)
    return parse_config(raw)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    nodes=st.integers(1, 2),
    gpus=st.sampled_from([1, 2, 4]),
    batch=st.sampled_from([4, 6, 8]),
    clip=st.sampled_from([None, 1.0]),
    memory_gib=st.floats(1e-4, 1e-2),
)
def test_every_layout_found_can_run_fits_and_learns_the_same(nodes, gpus, batch, clip, memory_gib):
    config = config_with(model={"layers": 4}, train={"global_batch": batch, "clip_norm": clip})
    cluster = cluster_of(
        nodes, gpus, link=LinkConfig(gbyte_per_s=0.01, latency_us=50.0), memory_per_gpu=memory_gib, tflops_per_gpu=0.01
    )
    found = search(config, cluster, top=10_000)
    assert found.num_seen == len(found.best) + found.num_too_large
    times_s = [candidate.prediction.step_s for candidate in found.best]
    assert times_s == pytest.approx(sorted(times_s), abs=2e-6)
    for candidate in found.best:
        validate_for_world(candidate.config, cluster.world)
        assert candidate.prediction.memory_gib <= 0.9 * memory_gib
        assert candidate.prediction == predict(candidate.config, cluster)
        changed = candidate.config.model_dump()
        asked = config.model_dump()
        changed["train"]["activation_checkpointing"] = asked["train"]["activation_checkpointing"]
        for section, varied in {
            "tensor_parallel": {"size"},
            "pipeline_parallel": {"depth", "micro_batches", "schedule", "weight_gradients"},
            "data_parallel": {"size", "mode", "overlap", "algorithm"},
        }.items():
            for key in varied:
                changed["parallel_config"][section][key] = asked["parallel_config"][section][key]
        assert changed == asked


def test_slow_links_between_nodes_keep_tensor_parallelism_inside_them():
    config = config_with(model={"hidden": 512, "layers": 4}, train={"global_batch": 4})
    slow = LinkConfig(gbyte_per_s=0.1, latency_us=50.0)
    best = search(config, cluster_of(2, 4, link=slow), top=1).best[0].config.parallel_config
    assert best.tensor_parallel.size <= 4
    assert best.world == 8


def test_where_nothing_fits_the_memory_the_least_is_said():
    found = search(config_with(), cluster_of(1, 2, memory_per_gpu=1e-5), top=5)
    assert found.best == []
    assert found.num_too_large == found.num_seen > 0
    assert found.least_gib > 1e-5


@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        (config_with(dp=2, data={"mode": "fsdp"}), 2, "mode: plan does not know how long fsdp takes"),
        (config_with(dp=2, data={"sync": "diloco"}), 2, "sync: plan does not know how long diloco takes"),
        (
            config_with(dp=2, data={"compression": "int8", "bucket_mb": 1.0}),
            2,
            "compression: plan does not know how long int8 takes",
        ),
        (
            config_with(dp=2, data={"compression_in_node": "bf16", "bucket_mb": 1.0, "algorithm": "hierarchical"}),
            2,
            "compression_in_node: plan does not know how long bf16 takes",
        ),
        (config_with(model={"layers": 2}), 7, "no layout fits 7 ranks; nearest: "),
    ],
)
def test_what_cannot_be_planned_is_refused(config, world, message):
    with pytest.raises(ConfigError, match=message):
        search(config, cluster_of(1, world), top=1)


CLUSTER = {
    "node_count": 1,
    "gpu_per_node": 2,
    "memory_per_gpu": 1.0,
    "memory_gbyte_per_s": 5.0,
    "tflops_per_gpu": 0.01,
    "in_node": {"gbyte_per_s": 0.5, "latency_us": 100.0},
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"in_node": None}, "in_node: missing; the 2 GPUs of a node send through it"),
        ({"node_count": 2}, "across_nodes: missing; 2 nodes send through it"),
        ({"gpu_per_nod": 2}, "gpu_per_nod: unknown key; did you mean gpu_per_node?"),
        ({"tflops_per_gpu": 0}, "tflops_per_gpu: must be greater than 0"),
        ({"in_node": {"gbyte_per_s": 1.0}}, "in_node.latency_us: missing"),
    ],
)
def test_a_mistake_in_the_cluster_is_one_line(tmp_path, change, line):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(CLUSTER | change))
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert any(found.startswith(line) for found in caught.value.lines)


def test_the_example_cluster_is_one():
    cluster = load_cluster(ROOT / "examples" / "cluster.yaml")
    assert (cluster.world, cluster.node_of(31)) == (32, 3)


@pytest.fixture
def files(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A tiny configuration, and a cluster; started by no launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "text.txt").write_text("all work and no play\n" * 200)
    raw = {
        "model": {"layers": 2, "hidden": 32, "heads": 4},
        "data": {"seq_len": 16, "path": str(tmp_path / "text.txt")},
        "train": {"steps": 3, "global_batch": 4},
    }
    config, cluster = tmp_path / "tiny.yaml", tmp_path / "cluster.yaml"
    config.write_text(yaml.safe_dump(raw))
    cluster.write_text(yaml.safe_dump(CLUSTER))
    return config, cluster


def invoke(*arguments: str | Path):
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])


def test_plan_shows_layouts_and_writes_the_fastest(files, tmp_path):
    config, cluster = files
    result = invoke(
        config, "--cluster", cluster, "--top", 3, "--json", tmp_path / "plan.json", "--write", tmp_path / "b.yaml"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].startswith("1 x 2 ranks, each 0.01 TFLOP/s and 1 GiB; in the node 0.5 GB/s")
    layouts = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    assert len(layouts) == 3
    assert layouts[0]["predicted"]["step_s"] <= layouts[1]["predicted"]["step_s"]
    best = load_config(tmp_path / "b.yaml")
    validate_for_world(best, 2)
    assert best.parallel_config.model_dump(mode="json") == layouts[0]["parallel_config"]


def test_plan_measures_this_machine_and_tries_the_best(files, tmp_path):
    config, _ = files
    result = invoke(config, "--ranks", 2, "--try", 1, "--top", 2, "--json", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["cluster"]["node_count"], found["cluster"]["gpu_per_node"]) == (1, 2)
    assert found["cluster"]["tflops_per_gpu"] > 0
    assert found["layouts"][0]["measured_step_s"] > 0
    assert found["layouts"][1]["measured_step_s"] is None


@pytest.mark.parametrize(
    ("arguments", "environment", "line"),
    [
        (["--cluster", "missing.yaml"], {}, "--cluster missing.yaml: cannot be read: No such file or directory"),
        (["--cluster", "CLUSTER", "--ranks", "2"], {}, "--ranks: is for what is measured; the file of --cluster says"),
        (["--try", "1"], {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "--try: starts ranks itself"),
        (["--ranks", "1000"], {}, "parallel_config: 1000 ranks are too many for the"),
        (["--cluster", "CLUSTER", "--write", "no/folder/b.yaml"], {}, "--write no/folder/b.yaml: there is no folder"),
        (["--cluster", "CLUSTER", "--set", "model.heads=3"], {}, "CONFIG: no layout fits 2 ranks; nearest: "),
    ],
)
def test_a_mistake_of_the_command_is_one_line(files, monkeypatch, arguments, environment, line):
    config, cluster = files
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = invoke(config, *(str(cluster) if argument == "CLUSTER" else argument for argument in arguments))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(line.replace("CONFIG", str(config)))
    assert len(result.stderr.splitlines()) == 1


def test_a_memory_too_small_is_said(files):
    config, cluster = files
    cluster.write_text(yaml.safe_dump(CLUSTER | {"memory_per_gpu": 1e-6}))
    result = invoke(config, "--cluster", cluster)
    assert result.exit_code == 1
    assert "the smallest needs" in result.stdout

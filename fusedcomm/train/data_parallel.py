"""What data-parallel ranks share out, and what they sum and when, as the configuration says."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed import ProcessGroup

from fusedcomm.comm.collective import bulk_group
from fusedcomm.comm.compress import Layout, packed_layout
from fusedcomm.comm.mesh import Mesh
from fusedcomm.parallel import FullySharded, GradientBuckets, Optimizer, Pipeline
from fusedcomm.parallel.replicas import Delayed, Outer, Replicas
from fusedcomm.parallel.sums import Sums, SumSpec
from fusedcomm.train.config import Config


class DataParallel:
    """Opens what the `mode`, `overlap` and `sync` of `parallel_config.data_parallel` ask for.

    Every rank opens the same, in the same order, since groups are made and links may be measured then.

    Attributes:
        sums: what sums gradients, or what weights have moved by; None where nothing is summed, or only the owners of
            shares have the sums.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self._data, self._mesh = config.parallel_config.data_parallel, mesh
        self._timeout_s = config.train.timeout_s
        # Blocks that run in turns do so past the forwards of layers.
        self._runs_layers = config.transformer().tp_sync == "every_layer"
        self.sums: Sums | None = None

    @property
    def overlaps_forward(self) -> bool:
        """Whether sums may arrive during the next step's forward."""
        return self._data.overlap == "backward+forward" and self._mesh.dp > 1

    @property
    def shards_optimizer(self) -> bool:
        """Whether each rank has the summed gradients, masters and moments of its own rows only."""
        return self._data.mode != "replicate" and self._mesh.dp > 1

    @property
    def shards_weights(self) -> bool:
        """Whether it has the weights, as fp32 masters, of its own rows only; they are gathered where they are used."""
        return self._data.mode == "fsdp" and self._mesh.dp > 1

    @property
    def trains_apart(self) -> bool:
        """Whether replicas step on their own between two syncs."""
        return self.sync in ("local_sgd", "diloco")

    @property
    def sync(self) -> str:
        """What is summed and when, as configured; a single replica has nothing to put off."""
        return self._data.sync if self._mesh.dp > 1 else "every_step"

    def open_buckets(self, pipeline: Pipeline) -> GradientBuckets | FullySharded:
        """What takes the gradients of the stages, which are sharded already with `shards_weights`."""
        if self.shards_weights:
            return FullySharded(
                pipeline.stages,
                dp_group=self._mesh.dp_group,
                tp_group=self._mesh.tp_group,
                keep_gathered=self._mesh.pp > 1,
                split_backward=pipeline.splits_backward,
            )
        return GradientBuckets(
            pipeline.named_parameters(),
            dp_group=self._mesh.dp_group if self.sync == "every_step" else None,
            tp_group=self._mesh.tp_group,
            bucket_mb=self._data.bucket_mb,
            window_mb=self._data.window_mb,
            layers=self._layers_that_wait(pipeline),
            collective=self._open_sums,
            sharded=self.shards_optimizer,
            # What a stage received is overwritten when its backward is over.
            puts_off=self._mesh.pp == 1,
        )

    def open_replicas(self, optimizer: Optimizer) -> Replicas | None:
        """What makes the optimizer's masters those of all replicas from time to time, where they train apart."""
        if not self.trains_apart:
            return None
        data = self._data
        masters = {name: state["master"] for name, state in optimizer.state_dict().items()}
        return Replicas(
            masters,
            self._open_sums(self._bulk_group(), packed_layout(masters, self._mesh.device)),
            world=self._mesh.dp,
            sync_every=data.sync_every,
            outer=Outer(data.outer_lr, data.outer_momentum, data.outer_overlap) if data.sync == "diloco" else None,
            after_change=optimizer.round_masters,
        )

    def open_delayed(self, buckets: GradientBuckets | FullySharded) -> Delayed | None:
        """What puts the last step's sum in the place of this step's gradients, where `sync` is `delayed`."""
        if self.sync != "delayed":
            return None
        assert isinstance(buckets, GradientBuckets), "modes.py refuses the rest"
        return Delayed(buckets.flat, self._open_sums(self._bulk_group(), buckets.layout))

    def _bulk_group(self) -> ProcessGroup:
        return bulk_group(self._mesh.dp_group, self._mesh.device, self)

    def _open_sums(self, group: ProcessGroup, layout: Layout) -> Sums:
        data = self._data
        spec = SumSpec(
            data.algorithm,
            data.ranks_per_node,
            data.compression,
            data.compression_in_node,
            data.powersgd_rank,
            data.topk_fraction,
        )
        self.sums = Sums(spec, group, layout, timeout_s=self._timeout_s)
        return self.sums

    def _layers_that_wait(self, pipeline: Pipeline) -> Iterator[nn.Module]:
        """The modules whose forwards come one after the other, each of which may wait for its own parameters."""
        if not self.overlaps_forward and not self.shards_optimizer:
            return
        for stage in pipeline.stages.values():
            if not self._runs_layers:
                yield stage
                continue
            for child in stage.children():
                yield from child.values() if isinstance(child, nn.ModuleDict) else (child,)

"""Data and pipeline parallelism around tensor-parallel layers, and the optimizer that sees the whole mesh."""

from fusedcomm.parallel.buckets import main_grad_of
from fusedcomm.parallel.data import GradientBuckets
from fusedcomm.parallel.disk import ActivationParking, DiskFolder, DiskTensors
from fusedcomm.parallel.fully_sharded import FullySharded, fully_shard_stage
from fusedcomm.parallel.optimizer import LossScale, Optimizer, StepResult, cosine_lr
from fusedcomm.parallel.pipeline import BuildStage, Pipeline
from fusedcomm.parallel.schedule import SCHEDULES, split_layers, stage_to_rank, stages_on_each_rank
from fusedcomm.parallel.tied import TiedWeights, tied_group
from fusedcomm.parallel.wgrad import WgradQueue

__all__ = [
    "SCHEDULES",
    "ActivationParking",
    "BuildStage",
    "DiskFolder",
    "DiskTensors",
    "FullySharded",
    "GradientBuckets",
    "LossScale",
    "Optimizer",
    "Pipeline",
    "StepResult",
    "TiedWeights",
    "WgradQueue",
    "cosine_lr",
    "fully_shard_stage",
    "main_grad_of",
    "split_layers",
    "stage_to_rank",
    "stages_on_each_rank",
    "tied_group",
]

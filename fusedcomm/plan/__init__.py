"""Which layout of a model is fastest on a cluster: predicted from what ops, schedules and sums know of themselves."""

from fusedcomm.plan.cluster import Cluster, LinkConfig, load_cluster
from fusedcomm.plan.search import Candidate, Found, search
from fusedcomm.plan.simulate import Prediction, predict

__all__ = ["Candidate", "Cluster", "Found", "LinkConfig", "Prediction", "load_cluster", "predict", "search"]

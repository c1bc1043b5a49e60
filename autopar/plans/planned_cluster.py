"""The cluster of a plan, read back from its name."""

from __future__ import annotations

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster, MixedCluster
from autopar.plans.plan_value import PlanValue


def cluster_of(plan: PlanValue) -> Cluster | None:
    """None where the plan was made for a cluster that its name does not describe, or for several kinds of devices."""
    try:
        cluster = Cluster.parse(plan.cluster)
    except ConfigurationError:
        return None
    return None if isinstance(cluster, MixedCluster) or cluster.num_devices != plan.num_ranks else cluster

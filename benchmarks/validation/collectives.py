"""Seconds of published collectives, predicted by the cost model that the planner uses.

A row becomes a question (which collective, how many bytes, which ranks on which nodes, whose hardware), the question a
cluster and a `GroupTopology`, and `collective_seconds` answers. Each measured column is a view of that one answer:

    time_us = t,   algbw_GBps = bytes / t,   busbw_GBps = algbw * bus factor (all_reduce of n: 2 (n-1) / n)

Tiers differ in the links that the cost model gets. t0: presets. t1: presets with what `collective_profiles.json` has
measured on that machine in place of it. physics: nominal rates and NCCL's own latencies, no startup, no fitted trait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.collective_costs import CollectiveKind, collective_seconds
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from benchmarks.validation.collective_machines import Machine, read_machine
from benchmarks.validation.collective_profiles import fitted, nominal
from benchmarks.validation.fields import Unpredictable, integer, number, text, whole
from benchmarks.validation.schemas import Predicted, Schema, Tier
from benchmarks.validation.token_exchanges import predict_exchange

_KINDS: tuple[tuple[str, CollectiveKind], ...] = (
    # what the text of a row holds, in order of preference
    (r"all_?reduce", "all_reduce"),
    (r"all_?gather", "all_gather"),
    (r"reduce_?scatter", "reduce_scatter"),
    (r"all_?to_?all|all2all|a2a", "all_to_all"),
    (r"send|recv|p2p", "neighbours"),
    (r"broadcast", "broadcast"),
    (r"any ring", "all_gather"),
)
LARGE_BYTES = 16 * 2.0**30
"""A bandwidth without a size is the asymptote of a sweep: 16 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One collective on one machine, alone unless `siblings` groups share each node."""

    hardware: str
    kind: CollectiveKind
    nbytes: float | None
    """Of the full buffer; None: as large as sweeps go."""
    ranks: int
    nodes: int
    siblings: int = 1

    @property
    def topology(self) -> GroupTopology:
        """How the group lies on its nodes."""
        per_node = -(-self.ranks // self.nodes)
        return GroupTopology(ranks=self.ranks, nodes=self.nodes, ranks_per_node=per_node, groups_per_node=self.siblings)


def predict(rows: Sequence[Mapping[str, str]], schema: Schema, tier: Tier) -> list[Predicted]:
    """One prediction per row, in order; a row whose hardware or meaning is not known has a reason instead."""
    answer = _ANSWERS[schema.name]
    predictions = []
    for row in rows:
        try:
            predictions.append(Predicted(values=answer(row, tier)))
        except (ConfigurationError, Unpredictable) as error:
            predictions.append(Predicted(reason=str(error)))
    return predictions


def naive(rows: Sequence[Mapping[str, str]], schema: Schema) -> list[Predicted]:
    """The baseline: bus factor * bytes / vendor's link rate, without latency, protocol or algorithm."""
    if schema.name not in _QUESTIONS:
        return [Predicted(reason=f"no bus formula for {schema.name}")] * len(rows)
    predictions = []
    for row in rows:
        try:
            question = _QUESTIONS[schema.name](row)
            cluster = nominal(read_machine(question.hardware), question.ranks, question.nodes)
        except (ConfigurationError, Unpredictable) as error:
            predictions.append(Predicted(reason=str(error)))
            continue
        rate = cluster.intra_link.bytes_per_second
        if question.nodes > 1:
            rate = min(rate, cluster.inter_link.bytes_per_second * cluster.devices_per_node / question.siblings)
        nbytes = LARGE_BYTES if question.nbytes is None else max(question.nbytes, 1.0)
        seconds = bus_factor(question.kind, question.ranks) * nbytes / rate
        predictions.append(Predicted(values=_VIEWS[schema.name](question, seconds)))
    return predictions


def bus_factor(kind: CollectiveKind, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth (nccl-tests doc/PERFORMANCE.md @a0b82b2)."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0, "neighbours": 1.0}.get(kind, share)


def cluster_of(question: Question, tier: Tier) -> tuple[Cluster, float]:
    """The cluster of a question in a tier, and the least seconds that its benchmark can show (t1 only).

    Raises ConfigurationError where the text names no known hardware and, in t1, no profile stands for it either.
    """
    whole = question.siblings > 1
    found = fitted(question.hardware, question.kind, question.ranks, question.nodes, whole, tier)
    if found is not None:
        return found
    machine: Machine = read_machine(question.hardware)
    if question.nodes > 1 and not machine.names_network:
        raise Unpredictable(f"{question.hardware!r} names no network between its {question.nodes} nodes")
    if tier == "physics":
        return nominal(machine, question.ranks, question.nodes), 0.0
    return machine.cluster(ranks=question.ranks, nodes=question.nodes, whole_nodes=whole), 0.0


def seconds_of(question: Question, tier: Tier) -> float:
    """What the cost model says in this tier."""
    cluster, least = cluster_of(question, tier)
    nbytes = LARGE_BYTES if question.nbytes is None else max(question.nbytes, 1.0)
    return max(least, float(collective_seconds(question.kind, np.float64(nbytes), question.topology, cluster)))


def read_kind(name: str) -> CollectiveKind:
    """The collective that a row names. Raises Unpredictable where it names none that we price."""
    for pattern, kind in _KINDS:
        if re.search(pattern, name.lower()):
            return kind
    raise Unpredictable(f"collective {name!r} has no price")


def read_bytes(size: str) -> float | None:
    """Bytes of a size as text; None for "large", "peak of sweep" and ">=32MB": as large as sweeps go."""
    match = re.search(r"(\d+(?:\.\d+)?)\s*(?:([kmg])i?b?)?", size.lower())
    if match is None or size.lstrip().startswith((">", "≥")):
        return None
    return float(match[1]) * {None: 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30}[match[2]]


def _group(row: Mapping[str, str]) -> tuple[int, int]:
    """(ranks, nodes) of a row. Raises Unpredictable where they make no group of two or more."""
    ranks = integer(row, "n_ranks")
    if "devices_per_node" in row:
        nodes = -(-ranks // max(1, integer(row, "devices_per_node", ranks)))
    else:
        nodes = integer(row, "n_nodes", 1)
    if ranks < 2 or not 1 <= nodes <= ranks:
        raise Unpredictable(f"{ranks} ranks on {nodes} nodes are no group")
    return ranks, nodes


def _sweep_question(row: Mapping[str, str]) -> Question:
    ranks, nodes = _group(row)
    return Question(
        hardware=text(row, "hw"),
        kind=read_kind(row["collective"]),
        nbytes=read_bytes(row["msg_bytes"]),
        ranks=ranks,
        nodes=nodes,
    )


def _sweep_values(question: Question, seconds: float) -> dict[str, float | str]:
    nbytes = LARGE_BYTES if question.nbytes is None else question.nbytes
    algorithm = nbytes / seconds * 1e-9
    bus = algorithm * bus_factor(question.kind, question.ranks)
    values: dict[str, float | str] = {"algbw_GBps": algorithm, "busbw_GBps": bus, "busbw_inplace_GBps": bus}
    if question.nbytes is not None:  # an asymptote has a rate and no time
        values |= {"time_us": seconds * 1e6, "time_us_inplace": seconds * 1e6}
    return values


def _vidur_values(question: Question, seconds: float) -> dict[str, float | str]:
    return {"time_ms_median_over_ranks": seconds * 1e3, "time_ms_max_over_ranks": seconds * 1e3}


def _nnscaler_question(row: Mapping[str, str]) -> Question:
    ranks, nodes = _group(row)
    return Question(
        hardware=text(row, "hw"),
        kind=read_kind(row["collective"]),
        nbytes=number(row, "size_mb") * 2.0**20,
        ranks=ranks,
        nodes=nodes,
    )


def _nnscaler_values(question: Question, seconds: float) -> dict[str, float | str]:
    return {"time_us": seconds * 1e6}


GALVATRON = "Galvatron"
"""Name of the machine whose file says nothing about hardware: it has a profile, and no other tier knows it."""


def _galvatron_question(row: Mapping[str, str]) -> Question:
    if "bandwidth" not in row["metric"] and "busbw" not in row["metric"]:
        raise ConfigurationError(
            f"{row['metric']!r} is no collective: the slowdown of overlap belongs to the simulator"
        )
    ranks, nodes, gpus = (int(row[column]) for column in ("group_size", "nodes", "gpus_per_node"))
    if row["metric"].startswith("p2p"):
        # a pipeline of that many stages over all devices: stages lie on different nodes where there are several
        return Question(hardware=GALVATRON, kind="neighbours", nbytes=None, ranks=max(2, nodes), nodes=nodes)
    spread = row["consecutive"] == "0" and ranks < nodes * gpus
    spanned = nodes if spread or ranks > gpus else 1
    siblings = whole(gpus, whole(ranks, spanned, "ranks on nodes"), "groups on a node") if spread and nodes > 1 else 1
    return Question(hardware=GALVATRON, kind="all_reduce", nbytes=None, ranks=ranks, nodes=spanned, siblings=siblings)


def _galvatron_values(question: Question, seconds: float) -> dict[str, float | str]:
    return {"value": LARGE_BYTES / seconds * 1e-9 * bus_factor(question.kind, question.ranks)}


_RANKS_OF_NETWORK = re.compile(r"(\d+)x$")


def _simumax(row: Mapping[str, str], tier: Tier) -> dict[str, float | str]:
    """The efficiency of a link that another simulator fitted: what our model reaches of the same nominal rate."""
    if "inter" in row["network"]:
        raise Unpredictable("an efficiency between nodes that nobody fitted: the file sets one value for all")
    found = _RANKS_OF_NETWORK.search(row["network"])
    ranks = int(found[1]) if found else 8
    question = Question(hardware=row["system"], kind=read_kind(row["op"]), nbytes=None, ranks=ranks, nodes=1)
    rate = LARGE_BYTES / seconds_of(question, tier) * bus_factor(question.kind, ranks)
    return {"fitted_efficiency": rate * 1e-9 / number(row, "link_gbps")}


_QUESTIONS: Mapping[str, Callable[[Mapping[str, str]], Question]] = {
    "coll_nccl_tests": _sweep_question,
    "coll_vidur_network": _sweep_question,
    "coll_nnscaler_mi250": _nnscaler_question,
    "coll_galvatron_bandwidth_summary": _galvatron_question,
}
_VIEWS: Mapping[str, Callable[[Question, float], dict[str, float | str]]] = {
    "coll_nccl_tests": _sweep_values,
    "coll_vidur_network": _vidur_values,
    "coll_nnscaler_mi250": _nnscaler_values,
    "coll_galvatron_bandwidth_summary": _galvatron_values,
}


def question_of(row: Mapping[str, str], schema: Schema) -> Question:
    """What a row of a sweep asks. Raises ConfigurationError for rows that are no collective."""
    return _QUESTIONS[schema.name](row)


def _sweep(name: str) -> Callable[[Mapping[str, str], Tier], dict[str, float | str]]:
    def answer(row: Mapping[str, str], tier: Tier) -> dict[str, float | str]:
        question = _QUESTIONS[name](row)
        return _VIEWS[name](question, seconds_of(question, tier))

    return answer


_ANSWERS: Mapping[str, Callable[[Mapping[str, str], Tier], dict[str, float | str]]] = {
    **{name: _sweep(name) for name in _QUESTIONS},
    "coll_deepep": predict_exchange,
    "coll_simumax_fits": _simumax,
}

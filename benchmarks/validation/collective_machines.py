"""From what a file writes about its hardware to the cluster that we price: GPU, wiring of a node, NICs, their rate.

    machine = read_machine("2x p4de.24xlarge (A100-80, EFA 400Gbps/node)")
    machine.device, machine.network, machine.node_bytes_per_second       # "A100-80", "EFA", 50e9
    machine.cluster(ranks=16, nodes=2)

Texts name parts in any order and style, so each part is looked for on its own; what is not named is the usual node of
the GPU. A text without a GPU that we know is an error with the text in it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import Link, NodePreset, find_node, network_link, preset_device, preset_link

_GPUS: tuple[tuple[str, str, str | None], ...] = (
    # what the text holds, device preset, link preset where it is not the usual node's
    (r"gb300", "GB300", None),
    (r"gb200", "GB200", None),
    (r"b300", "B300-SXM", None),
    (r"b200|sm_?100\b", "B200-SXM", None),
    (r"h800|sm_?90\b", "H800-SXM", None),
    (r"h200|\bp5en?\b", "H200-SXM", None),
    (r"h100.*pcie", "H100-PCIE", None),
    (r"h100.*pair", "H100-SXM", "NVLink4-pairs"),
    (r"h100|\bp5\b|p5\.", "H100-SXM", None),
    (r"a100.*pair", "A100-80", "NVLink3-pairs"),
    (r"a100.*pcie|pcie.*a100", "A100-PCIE-80", None),
    (r"a100[- \w]{0,8}\b40(?:gb)?\b|\bp4d\b", "A100-40", None),
    (r"a100|\bp4de?\b|p4de?\.", "A100-80", None),
    (r"a40.*pair", "A40", "NVLink3-bridge"),
    (r"\ba40\b", "A40", None),
    (r"\ba10g?\b|\bg5\b", "A10G", None),
    (r"\bl40s?\b", "L40", None),
    (r"\bl4\b", "L4", None),
    (r"v100.*pcie", "V100-PCIE", None),
    (r"v100|\bp3\w*\b", "V100-SXM2", None),
    (r"mi300", "MI300X", None),
    (r"mi250", "MI300X", "xGMI-MI250"),
    (r"4090", "RTX4090", None),
    (r"\bt4\b", "T4", None),
)  # a device only decides the usual node: collectives read the links
_NETWORKS = (
    (r"\befa|\bp4d|\bp[56]e?n?\b|\baws\b", "EFA"),
    (r"roce|infiniband|\bib\b|[hnex]dr\b|\bcx-?\d|connectx", "InfiniBand"),
    (r"ethernet|\btcp\b|\bena\b", "Ethernet"),
)
_GIGABITS = {"fdr": 56.0, "edr": 100.0, "hdr": 200.0, "ndr": 400.0, "xdr": 800.0}
_INSTANCES = {"p3dn": 100.0, "p4d": 400.0, "p4de": 400.0, "p5": 3200.0, "p5e": 3200.0, "p5en": 3200.0, "p6": 3200.0}
"""Gbit/s of one AWS node (stas00/ml-engineering network/README.md @744d01e)."""

_BITS = r"(?:gbps|gbit/s|gb/s|gbit|gb|g)"
_RATES: tuple[tuple[str, Callable[[re.Match[str], int], float]], ...] = (
    # a rate of one node in Gbit/s, from the most to the least explicit wording
    (r"(\d+)\s*gb/s per gpu(?! per)", lambda m, gpus: 8.0 * float(m[1]) * gpus),  # "50GB/s per GPU": bytes
    (rf"(\d+(?:\.\d+)?)\s*{_BITS}\s*(?:/|per )\s*gpu", lambda m, gpus: float(m[1]) * gpus),
    (rf"(\d+(?:\.\d+)?)\s*{_BITS}\s*(?:/|per )\s*node", lambda m, gpus: float(m[1])),
    (r"(\d+)\s*x\s*(fdr|edr|hdr|ndr|xdr)", lambda m, gpus: float(m[1]) * _GIGABITS[m[2]]),
    (rf"(\d+)\s*x\s*(\d+)\s*{_BITS}\b", lambda m, gpus: float(m[1]) * float(m[2])),
    (rf"(?:efa|roce)\D{{0,12}}?(\d{{3,4}})\s*{_BITS}\b", lambda m, gpus: float(m[1])),
    (rf"(\d+)\s*{_BITS}\s*(?:ethernet|tcp|ena)\b", lambda m, gpus: float(m[1])),
    (rf"cx-?\d+\D{{0,4}}(\d{{3}})\s*{_BITS}\b", lambda m, gpus: float(m[1]) * gpus),
    (rf"\b(\d{{3,4}})\s*{_BITS}\b", lambda m, gpus: float(m[1]) * (1 if float(m[1]) >= 800 else gpus)),
    (r"\b(fdr|edr|hdr|ndr|xdr)\b", lambda m, gpus: _GIGABITS[m[1]] * gpus),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of node and the network between such nodes."""

    device: str
    node: NodePreset
    intra: Link
    network: str
    """Preset of the network's kind."""
    node_bytes_per_second: float | None
    """All NICs of a node, per direction; None: the NICs of the usual node."""
    names_network: bool
    """Whether the text says anything of a network; nodes of the same name differ widely in it."""

    def cluster(self, *, ranks: int, nodes: int, whole_nodes: bool = False) -> Cluster:
        """`ranks` devices on `nodes` nodes, alone on them; `whole_nodes`: the other devices of the nodes work too.

        With fewer ranks than a node has devices, only their share of the NICs is theirs.
        """
        per_node = self.node.devices_per_node if whole_nodes else max(1, -(-ranks // nodes))
        return Cluster(
            name=f"{nodes}x{per_node} {self.device}",
            num_nodes=nodes,
            devices_per_node=per_node,
            device=preset_device(self.device),
            intra_link=self.intra,
            inter_link=self._network(per_node),
            collective_backend="nccl",
            profile="read from the text of a published measurement",
        )

    def _network(self, per_node: int) -> Link:
        node = dataclasses.replace(self.node, network_link=self.network)
        if self.node_bytes_per_second is None:
            return network_link(node, per_node)
        share = min(1.0, per_node / node.devices_per_node)
        return network_link(node, per_node, self.node_bytes_per_second * share)


def read_machine(text: str) -> Machine:
    """The machine that a text describes. Raises ConfigurationError where no GPU in it is known."""
    lower = text.lower().replace("_", " ")
    found = next(((device, link) for pattern, device, link in _GPUS if re.search(pattern, lower)), None)
    if found is None:
        raise ConfigurationError(f"hardware not known from {text!r}: it names no GPU with a preset")
    device, link = found
    node = find_node(device)
    intra = preset_link(link or node.intra_link)
    if re.search(r"\bring\b", lower):  # measured with NCCL_ALGO=Ring
        intra = dataclasses.replace(intra, traits=dataclasses.replace(intra.traits, multicast_fraction=0.0))
    network = next((name for pattern, name in _NETWORKS if re.search(pattern, lower)), None)
    rate = _node_rate(lower, node.devices_per_node)
    return Machine(
        device=device,
        node=node,
        intra=intra,
        network=network or node.network_link,
        node_bytes_per_second=rate,
        names_network=network is not None or rate is not None,
    )


def _node_rate(text: str, gpus: int) -> float | None:
    """Bytes/s of one node's NICs together, as the text says it; None where it says nothing."""
    for pattern, gigabits in _RATES:
        match = re.search(pattern, text)
        if match is not None:
            return gigabits(match, gpus) * 1e9 / 8
    for instance, rate in sorted(_INSTANCES.items(), key=lambda item: -len(item[0])):
        if re.search(rf"\b{instance}\b", text):
            return rate * 1e9 / 8
    return None

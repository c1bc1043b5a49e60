import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.devices import find_node, find_node_of_gpu, preset_device, preset_link


def test_ceilings_are_measured_rates_not_vendor_peaks() -> None:
    h100 = preset_device("H100-SXM")
    assert h100.flops_per_second["bfloat16"] == 794.5e12  # vendor: 989e12
    assert h100.memory_bytes_per_second < 3.35e12
    assert "measured" in h100.sources["flops_per_second[bfloat16]"]


def test_names_and_aliases_are_found_in_any_case() -> None:
    assert find_node("a100") == find_node("A100-80") == find_node("A100-sxm")
    assert find_node("aws-p5").network_link == "EFA"
    assert find_node("DGX GB300") == find_node("gb300_nvl72")
    assert find_node("p5.48xlarge") == find_node("AWS-p5")


def test_measured_collectives_stand_beside_their_link() -> None:
    assert ("all_to_all", 8) in {(fit.kind, fit.ranks) for fit in preset_link("NVSwitch4").fits}
    # rings and multicast are physics of the link, with the measurements that they were fitted on as source
    assert preset_link("NVSwitch4").traits.multicast_fraction > 0
    assert preset_link("NVSwitch4").traits.source


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA B200", "B200-SXM"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_a_gpu_is_found_by_the_name_its_driver_reports(name: str, device: str) -> None:
    assert find_node_of_gpu(name).device == device


def test_a_gpu_without_a_preset_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="Quadro"):
        find_node_of_gpu("NVIDIA Quadro T2000")

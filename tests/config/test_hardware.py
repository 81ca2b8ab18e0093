"""Devices: figures with sources, a user's file, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rorqual.config.hardware import known_devices, load_device, read_device
from rorqual.errors import ConfigError

WANTED = {
    "h20-96",
    "h20-141",
    "h100",
    "h800",
    "h200",
    "b200",
    "a100",
    "rtx4090",
    "l20",
    "ascend-a2",
    "ascend-a3",
    "cpu",
    "h200-measured",
}
MINIMAL: dict[str, Any] = {
    "memory_gib": 10,
    "bandwidth_gb_s": 100,
    "tflops": {"bfloat16": 5},
    "link": {"gb_s": 10, "latency_us": 5, "span": 2},
    "network": {"gb_s": 1, "latency_us": 50},
    "sources": dict.fromkeys(("memory", "bandwidth", "flops", "link", "network"), "made up"),
}


def test_the_gpus_that_ship() -> None:
    assert set(known_devices()) >= WANTED
    for name in known_devices():
        device = load_device(name)
        assert all(
            device.sources[figure] for figure in ("memory", "bandwidth", "flops", "link", "network")
        ), name
        assert 1e9 < device.memory < 300 * 2**30
        assert device.bandwidth > device.link.bandwidth > 0
        assert device.peak("bfloat16") >= device.peak("float32")


def test_datasheets() -> None:
    h200 = load_device("h200")
    a3 = load_device("ascend-a3")
    assert (h200.bandwidth, h200.peak("fp8"), h200.peak("bfloat16")) == (4.8e12, 1979e12, 989e12)
    assert h200.link.bandwidth * 2 == 900e9
    assert a3.ranks_per_chip * a3.peak("bfloat16") == 752e12
    assert load_device("a100").peak("fp8") == load_device("a100").peak("bfloat16"), (
        "no fp8: widened"
    )


def test_the_measured_gpu_stands_on_its_datasheet() -> None:
    device = load_device("h200-measured")
    sheet = load_device("h200")
    assert (device.bandwidth, device.link) == (sheet.bandwidth, sheet.link)
    assert device.achieved_bandwidth == pytest.approx(4361e9 / 4800e9, abs=1e-3)
    assert device.achieved_flops["bfloat16"] == pytest.approx(735 / 989, abs=1e-3)
    assert device.collectives["all_reduce"][8][0] == [14336, 11.3]


def test_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"mine": MINIMAL}))
    device = load_device(str(path))
    assert (device.name, device.memory, device.bandwidth, device.peak("bfloat16")) == (
        "mine",
        10 * 2**30,
        100e9,
        5e12,
    )
    assert device.link.latency == pytest.approx(5e-6)
    assert load_device("mine", path) == device
    path.write_text(
        yaml.safe_dump({"mine": MINIMAL, "faster": {"based_on": "h200", "bandwidth_gb_s": 9000}})
    )
    assert load_device("faster", path).bandwidth == 9e12
    assert load_device("faster", path).memory == load_device("h200").memory
    with pytest.raises(ConfigError, match="holds 2 devices"):
        load_device(str(path))
    with pytest.raises(ConfigError, match="holds no device 'other'"):
        load_device("other", path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gib": 0}, "memory_gib=0 must be a number above 0"),
        ({"bandwidth_gb_s": "fast"}, "bandwidth_gb_s='fast'"),
        ({"tflops": {"bf16": 3}}, "unknown entries bf16"),
        ({"tflops": {}}, "must be a table"),
        ({"link": {"gb_s": 3}}, "link lacks latency_us"),
        ({"network": {"gb_s": 3, "latency_us": -1}}, "network.latency_us=-1"),
        ({"colour": "red"}, "unknown fields colour"),
        ({"sources": {"memory": "x"}}, "sources lacks bandwidth, flops, link, network"),
        ({"achieved_bandwidth": 3.0}, "fraction of the peak"),
    ],
)
def test_bad_files_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_device("bad", {**MINIMAL, **change})


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device bad lacks bandwidth_gb_s"):
        read_device(
            "bad", {key: value for key, value in MINIMAL.items() if key != "bandwidth_gb_s"}
        )
    with pytest.raises(ConfigError, match="device 'h201' is not known"):
        load_device("h201")
    with pytest.raises(ConfigError, match="does not exist"):
        load_device(str(tmp_path / "none.yaml"))
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_device(str(tmp_path / "broken.yaml"))
    with pytest.raises(ConfigError, match="must be a table of fields"):
        read_device("bad", 3)

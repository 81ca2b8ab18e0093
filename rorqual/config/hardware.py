"""Specifications of devices and their interconnects: frozen data read from YAML. No torch.

Shipped devices are in planner/data/devices.yaml, measurements beside it; a user's file has the same
format. Files use datasheet units (GiB, GB/s, TFLOP/s, us); here they are bytes, bytes/s,
operations/s and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rorqual.errors import ConfigError

DATA = Path(__file__).resolve().parents[1] / "planner" / "data"
FIELDS = {
    "title",
    "memory_gib",
    "bandwidth_gb_s",
    "tflops",
    "link",
    "network",
    "host_link_gb_s",
    "ranks_per_chip",
    "engine_device",
    "sources",
}
FIELDS |= {
    "achieved_bandwidth",
    "achieved_flops",
    "launch_gap_us",
    "kernel_us",
    "collectives",
    "based_on",
    "measured",
    "gemm",
}
SOURCED = {
    "memory_gib": "memory",
    "bandwidth_gb_s": "bandwidth",
    "tflops": "flops",
    "link": "link",
    "network": "network",
}
ENGINE_DEVICES = ("auto", "npu")
DTYPES = ("float32", "bfloat16", "float16", "fp8", "int8", "fp4")


@dataclass(frozen=True)
class Interconnect:
    """One direction, for one device. `bandwidth`: bytes/s. `latency`: of a small message, seconds.
    `span`: number of connected devices."""

    bandwidth: float
    latency: float
    span: int = 1


@dataclass(frozen=True)
class DeviceSpec:
    """One rank's device. `flops`: peak operations/s by input dtype; a missing dtype is not
    supported.

    achieved_bandwidth, achieved_flops: measured fractions of the peaks for a large copy and a large
    GEMM. engine_device: its --device name, if `auto` would not find it. launch_gap: seconds between
    two kernels launched one by one. collectives: measured, {kind: {ranks: [[bytes, seconds],
    ...]}}.
    """

    name: str
    title: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    link: Interconnect
    network: Interconnect
    host_link: float
    sources: Mapping[str, str]
    ranks_per_chip: int = 1
    engine_device: str = "auto"
    achieved_bandwidth: float | None = None
    achieved_flops: Mapping[str, float] = field(default_factory=dict)
    launch_gap: float | None = None
    kernel: float | None = None
    collectives: Mapping[str, Any] = field(default_factory=dict)
    gemm: Mapping[str, Any] = field(default_factory=dict)
    measured: str | None = None

    def peak(self, dtype: str) -> float:
        """Operations/s; on a device without fp8, fp8 weights are converted to and multiplied as
        bf16."""
        if dtype in self.flops:
            return self.flops[dtype]
        if dtype in ("fp8", "float16", "fp4", "int8"):
            return self.peak("bfloat16")
        if dtype == "bfloat16":
            return self.peak("float32")
        raise ConfigError(
            f"device {self.name} has no {dtype} arithmetic; known: {', '.join(self.flops)}"
        )

    @property
    def is_npu(self) -> bool:
        return self.engine_device == "npu"

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.bandwidth, self.measured))


def _number(name: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(f"device {name}: {key}={value!r} must be a number above 0")
    return float(value)


def _table(name: str, key: str, value: Any, allowed: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise ConfigError(
            f"device {name}: {key}={value!r} must be a table of {', '.join(sorted(allowed))}"
        )
    unknown = sorted(str(item) for item in value if item not in allowed)
    if unknown:
        raise ConfigError(
            f"device {name}: {key} has unknown entries {', '.join(unknown)}; accepted: "
            f"{', '.join(sorted(allowed))}"
        )
    return value


def _engine_device(name: str, data: Mapping[str, Any]) -> str:
    value = data.get("engine_device", "auto")
    if value not in ENGINE_DEVICES:
        raise ConfigError(
            f"device {name}: engine_device={value!r}; accepted: {', '.join(ENGINE_DEVICES)}"
        )
    return str(value)


def _link(name: str, key: str, value: Any) -> Interconnect:
    table = _table(name, key, value, {"gb_s", "latency_us", "span"})
    missing = {"gb_s", "latency_us"} - set(table)
    if missing:
        raise ConfigError(f"device {name}: {key} lacks {', '.join(sorted(missing))}")
    gb_s = _number(name, f"{key}.gb_s", table["gb_s"])
    latency = _number(name, f"{key}.latency_us", table["latency_us"])
    return Interconnect(
        gb_s * 1e9, latency * 1e-6, int(_number(name, f"{key}.span", table.get("span", 1)))
    )


def _check_fields(name: str, data: Mapping[str, Any]) -> None:
    unknown = sorted(set(data) - FIELDS)
    if unknown:
        raise ConfigError(
            f"device {name}: unknown fields {', '.join(unknown)}; accepted: "
            f"{', '.join(sorted(FIELDS))}"
        )
    missing = sorted(key for key in SOURCED if key not in data)
    if missing:
        raise ConfigError(f"device {name} lacks {', '.join(missing)}")
    sources = data.get("sources")
    unsourced = sorted(set(SOURCED.values()) - set(sources if isinstance(sources, dict) else ()))
    if unsourced:
        raise ConfigError(
            f"device {name}: sources lacks {', '.join(unsourced)}; each figure says where it "
            "comes from"
        )


def read_device(name: str, data: Any) -> DeviceSpec:
    """Read one entry of a devices file. Raises ConfigError with the device, the field and the
    accepted values."""
    if not isinstance(data, dict):
        raise ConfigError(f"device {name} must be a table of fields, not {type(data).__name__}")
    if "based_on" in data:
        data = {
            **_raw(str(data["based_on"])),
            **{key: value for key, value in data.items() if key != "based_on"},
        }
    _check_fields(name, data)
    flops = _table(name, "tflops", data["tflops"], set(DTYPES))
    optional = {
        key: _number(name, key, data[key])
        for key in ("achieved_bandwidth", "launch_gap_us", "kernel_us")
        if key in data
    }
    achieved = (
        _table(name, "achieved_flops", data["achieved_flops"], set(DTYPES))
        if "achieved_flops" in data
        else {}
    )
    for key, value in [
        ("achieved_bandwidth", optional.get("achieved_bandwidth", 1.0)),
        *achieved.items(),
    ]:
        if _number(name, f"achieved {key}", value) > 1.05:
            raise ConfigError(
                f"device {name}: achieved {key}={value} is a fraction of the peak; accepted: 0 to 1"
            )
    return DeviceSpec(
        name=name,
        title=str(data.get("title", name)),
        memory=_number(name, "memory_gib", data["memory_gib"]) * 2**30,
        bandwidth=_number(name, "bandwidth_gb_s", data["bandwidth_gb_s"]) * 1e9,
        flops=MappingProxyType(
            {key: _number(name, f"tflops.{key}", value) * 1e12 for key, value in flops.items()}
        ),
        link=_link(name, "link", data["link"]),
        network=_link(name, "network", data["network"]),
        host_link=_number(name, "host_link_gb_s", data.get("host_link_gb_s", 25)) * 1e9,
        sources=MappingProxyType({str(key): str(value) for key, value in data["sources"].items()}),
        ranks_per_chip=int(_number(name, "ranks_per_chip", data.get("ranks_per_chip", 1))),
        engine_device=_engine_device(name, data),
        achieved_bandwidth=optional.get("achieved_bandwidth"),
        achieved_flops=MappingProxyType({key: float(value) for key, value in achieved.items()}),
        launch_gap=optional["launch_gap_us"] * 1e-6 if "launch_gap_us" in optional else None,
        kernel=optional["kernel_us"] * 1e-6 if "kernel_us" in optional else None,
        collectives=MappingProxyType(dict(data.get("collectives") or {})),
        gemm=MappingProxyType(dict(data.get("gemm") or {})),
        measured=str(data["measured"]) if "measured" in data else None,
    )


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; it should be a YAML file of devices") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{path} must be a table of devices by name")
    return found


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Any]:
    files = [DATA / "devices.yaml", *sorted((DATA / "measured").glob("*.yaml"))]
    return {name: data for path in files for name, data in _load(path).items()}


def _raw(name: str) -> dict[str, Any]:
    if name not in _shipped():
        raise ConfigError(
            f"device {name!r} is not known; known: {', '.join(sorted(_shipped()))}; or give a "
            "YAML file of your own"
        )
    return dict(_shipped()[name])


def known_devices() -> list[str]:
    return list(_shipped())


def load_device(name: str, file: str | Path | None = None) -> DeviceSpec:
    """A shipped device by name, or a device of a YAML `file`; `name` may be the path of a file with
    one device."""
    path = Path(file) if file else Path(name) if name.endswith((".yaml", ".yml")) else None
    if path is None:
        return read_device(name, _raw(name))
    devices = _load(path)
    if file is None:
        if len(devices) != 1:
            raise ConfigError(
                f"{path} holds {len(devices)} devices; name one of {', '.join(devices)} beside "
                "the file"
            )
        name = next(iter(devices))
    if name not in devices:
        raise ConfigError(f"{path} holds no device {name!r}; it holds {', '.join(devices)}")
    return read_device(name, devices[name])

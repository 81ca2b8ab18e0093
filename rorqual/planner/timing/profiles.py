"""Engines as the planner sees them: which kernel tables they run, and what they add to them.
Data: data/profiles.yaml. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from rorqual.config.hardware import DATA, DeviceSpec
from rorqual.errors import ConfigError
from rorqual.planner.costs.messages import DISPATCH
from rorqual.planner.timing.tables import KernelTables, load_tables


@dataclass(frozen=True)
class Profile:
    """small_us: time of a kernel that moves a few activations. small: number of such kernels in a
    dense and in a MoE layer, besides GEMMs. small_bytes: hidden-size columns that they read and
    write per token, all together. step_us: sampling and bookkeeping per step. prefill_kernels x
    prefill_launch_us: host time to launch one layer of an eager step. first_token_us: from the
    client to a prompt's step and back. queued_steps: decode steps already launched when a prompt
    arrives. max_chunk: most prompt tokens in a step. mixed_chunks: prompts share steps with
    decoding requests. shared_fused: shared experts are fused with the routed ones. routing:
    `table`: the kernel table's, `natural`: the requested one. dispatch: a low-latency exchange
    sends `blocks` of rows to every rank, as this engine, or a copy for each of a token's experts
    (`picks`), as DeepEP. calibrated: uses the device's own measured file. expert_factor: factor on
    the experts' times of the tables. padded: steps compute all rows of their captured bucket. npu:
    for NPUs only. product_us: start-up of a GEMM, small_us if left out. *_reached: fractions of the
    device's peaks if nothing is measured. flops_by_dtype: dtypes with another fraction.
    """

    name: str
    title: str
    tables: str | None
    devices: tuple[str, ...]
    scales_to: tuple[str, ...]
    small_us: float
    small: Mapping[str, int]
    small_bytes: float
    step_us: float
    prefill_kernels: int
    prefill_launch_us: float
    first_token_us: float
    shared_fused: bool
    routing: str
    max_chunk: int
    mixed_chunks: bool
    sources: Mapping[str, str]
    queued_steps: float = 0.0
    calibrated: bool = False
    dispatch: str = "blocks"
    padded: bool = False
    expert_factor: float = 1.0
    npu: bool = False
    product_us: float | None = None
    bandwidth_reached: float = 0.85
    flops_reached: float = 0.7
    flops_by_dtype: Mapping[str, float] = field(default_factory=dict)
    link_reached: float = 0.8

    def __hash__(self) -> int:
        return hash(self.name)

    def kernel_tables(self) -> KernelTables | None:
        return load_tables(self.tables) if self.tables else None

    def check(self, device: DeviceSpec) -> bool:
        """True where the device is measured, False where times are scaled to it. Raises
        ConfigError where there is no ground to."""
        if self.calibrated and not device.measured:
            raise ConfigError(
                f"profile {self.name} needs a measured device, and {device.name} is none; run "
                "rorqual bench calibrate on it"
            )
        if self.npu and not device.is_npu:
            raise ConfigError(
                f"profile {self.name} is for NPUs (ascend-a2, ascend-a3, or a file based_on one), "
                f"not {device.name}"
            )
        if not self.tables or device.name in self.devices:
            return bool(self.tables) or self.calibrated
        if device.name in self.scales_to or (device.measured and device.measured in self.scales_to):
            return False
        known = ", ".join((*self.devices, *self.scales_to))
        raise ConfigError(
            f"profile {self.name} has no kernel times for device {device.name}, nor for one "
            f"of its kind; it covers {known}. "
            "Use --profile roofline for lower bounds, or rorqual bench calibrate on that device"
        )


@lru_cache(maxsize=1)
def _profiles() -> dict[str, Profile]:
    import yaml

    data = yaml.safe_load((DATA / "profiles.yaml").read_text())
    return {name: _read(name, entry) for name, entry in data.items()}


def _read(name: str, entry: Mapping[str, Any]) -> Profile:
    known = {item.name for item in fields(Profile)}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ConfigError(f"profile {name} has unknown fields {', '.join(unknown)}")
    lists = {key: tuple(entry.get(key, ())) for key in ("devices", "scales_to")}
    found = Profile(**{"name": name, **entry, **lists})
    if found.dispatch not in DISPATCH:
        raise ConfigError(
            f"profile {name} has dispatch={found.dispatch!r}; accepted: {', '.join(DISPATCH)}"
        )
    return found


def load_profile(name: str) -> Profile:
    if name not in _profiles():
        raise ConfigError(f"profile {name!r} is not known; known: {', '.join(_profiles())}")
    return _profiles()[name]


def with_kernels(profile: Profile, path: str | None) -> Profile:
    """The profile with the times of `bench calibrate --full`, only for the GPU that they are from,
    under another name. Raises ConfigError if the profile is not for our kernels."""
    if path is None:
        return profile
    if profile.name != "rorqual":
        raise ConfigError(
            f"kernels={path} holds times of this engine; profile {profile.name} is another's. "
            "Accepted: --profile rorqual, or auto on a GPU that has one"
        )
    if not path.endswith(".json"):
        raise ConfigError(f"kernels={path} must be a file.json of bench calibrate --full")
    device = load_tables(path).device
    return replace(profile, name=f"rorqual {path}", tables=path, devices=(device,), scales_to=())


def profile_for(device: DeviceSpec) -> Profile:
    """This engine's where it has kernel times for the device or its kind, Ascend's on an NPU, else
    the bare roofline."""
    own = load_profile("rorqual")
    if device.name in (*own.devices, *own.scales_to):
        return own
    if device.measured:
        return load_profile("calibrated")
    return load_profile("ascend" if device.is_npu else "roofline")

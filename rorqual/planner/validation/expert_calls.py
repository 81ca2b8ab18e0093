"""When an expert in another process costs as much to call as one's own to read: bytes over
bandwidth, and a network's time for a message. No torch."""

from __future__ import annotations

from dataclasses import replace

from rorqual.config.hardware import DeviceSpec, load_device
from rorqual.config.model import ModelConfig
from rorqual.planner.costs.catalog import published
from rorqual.planner.timing.roofline import expert_seconds, rpc_seconds, with_link
from rorqual.planner.validation.deployed import R1, Line

GBITS = (1, 10, 25, 100)
LATENCIES = (5, 20, 100)  # us, one direction
SCALE_COLUMNS = 128  # of a row in fp8, a scale of 4 bytes for so many


def expert_rpc() -> list[Line]:
    """When does an expert of one's own cost as much to call as to compute?"""
    config = published(R1)
    lines = []
    for name, gbit in (("rtx4090", 10), ("rtx4090", 100), ("h800", 400)):
        device = with_link(load_device(name), gbit)
        own = expert_seconds(config, device)
        lines.append(
            Line(
                f"{device.title}, {gbit} Gb/s: read one expert",
                f"{own * 1e6:.0f} us",
                f"44.0 MB / {device.bandwidth / 1e9:.0f} GB/s",
            )
        )
        call = rpc_seconds(config, device, 1)
        row = config.hidden_size * 2
        even = max(0.0, (own / 2 - device.network.latency) * device.network.bandwidth / row)
        how = (
            f"as long as the read at {even:.0f} tokens"
            if even >= 1
            else "latency alone is longer than the read"
        )
        lines.append(Line("  call it for one token", f"{call * 1e6:.0f} us", how))
    return [
        *lines,
        *(line for name in ("rtx4090", "h200") for line in eight_at_once(config, name)),
        Line(
            "floor of a step with an expert a GPU",
            f"{58 * expert_seconds(config, load_device('h800')) * 1e3:.2f} ms of experts on H800",
            "58 reads, whatever the batch",
        ),
    ]


def eight_at_once(config: ModelConfig, name: str) -> list[Line]:
    """One row and a layer's experts: all read here, or each on a server of its own. The caller's
    wire carries every copy of the row, out in fp8 and back in the model's dtype."""
    device = load_device(name)
    picks = config.moe.top_k
    here = picks * expert_seconds(config, device)
    layers = sum(config.moe_layers)
    lines = [
        Line(
            f"{device.title}: one row reads its {picks} experts of a layer",
            f"{here * 1e6:.0f} us",
            f"{layers * here * 1e3:.1f} ms a token over {layers} layers",
        )
    ]
    for gbit in GBITS:
        found = [called(config, with_latency(device, gbit, us)) for us in LATENCIES]
        wins = [us for us, seconds in zip(LATENCIES, found, strict=True) if seconds < here]
        lines.append(
            Line(
                f"  {device.title}: on {picks} servers at once, {gbit} Gbit/s",
                f"{', '.join(f'{seconds * 1e6:.0f}' for seconds in found)} us",
                f"at {', '.join(map(str, LATENCIES))} us one way; "
                + (f"shorter up to {wins[-1]} us" if wins else "never shorter"),
            )
        )
    return lines


def with_latency(device: DeviceSpec, gbit: float, microseconds: float) -> DeviceSpec:
    linked = with_link(device, gbit)
    return replace(linked, network=replace(linked.network, latency=microseconds * 1e-6))


def called(config: ModelConfig, device: DeviceSpec) -> float:
    """Seconds of a layer for one row whose experts are all on different servers."""
    width = config.hidden_size
    row = width + 4 * -(-width // SCALE_COLUMNS) + 2 * width
    network = device.network
    wire = config.moe.top_k * row / network.bandwidth
    return expert_seconds(config, device) + 2 * network.latency + wire

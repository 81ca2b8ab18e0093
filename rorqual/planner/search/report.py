"""What `rorqual plan` prints and writes: one page in words and tables, the Pareto front as CSV
and PNG, the command to start it."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rorqual.config.hardware import known_devices, load_device
from rorqual.config.whole_file import write_whole
from rorqual.errors import ConfigError
from rorqual.planner.costs import costs
from rorqual.planner.costs.routing import distinct_experts
from rorqual.planner.search.deployments import Option, Question, layout_name
from rorqual.planner.search.planner import DeploymentPlan, distinct_best
from rorqual.planner.timing.roofline import compute_bound_tokens, expert_seconds, rpc_seconds
from rorqual.planner.timing.tables import RENEWAL
from rorqual.planner.validation.deployed import Line
from rorqual.planner.validation.validation import ValidationGroup


def table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        made.add_column(
            column, justify="left" if index in (0, len(columns) - 1) else "right", overflow="fold"
        )
    return made


def show(plan: DeploymentPlan, model: str, top: int, console: Console) -> None:
    """The page: what fits, what is best and why, what limits it, what does not work, and the
    command."""
    question = plan.question
    console.print(
        f"[bold]{model}[/bold] on {question.count} x {question.device.title}", highlight=False
    )
    for line in premises(question):
        console.print(line, highlight=False)
    good = distinct_best(plan.options, top)
    if good:
        console.print(
            "\n[bold]Best deployments[/bold] (output tokens/s a GPU, all prompts included)",
            highlight=False,
        )
        console.print(options_table(good))
        for line in [*reasons(plan, good[0]), *stale_lines(plan)]:
            console.print(line, highlight=False)
    else:
        for line in none_found(plan):
            console.print(line, highlight=False)
        if plan.missed:
            console.print("\n[bold]Nearest to the goal[/bold]")
            console.print(options_table(distinct_best(plan.missed, top)))
            for line in stale_lines(plan):
                console.print(line, highlight=False)
    for line in [*sizes_lines(question, good[0] if good else None), *rejected_lines(plan)]:
        console.print(line, highlight=False)
    if good:
        console.print("\n[bold]To start the first[/bold]")
        for line in commands(model, question, good[0]):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def premises(question: Question) -> list[str]:
    config = question.config
    device = question.device
    held = costs.weight_bytes(question.config, fmt=question.fmt)
    usable = device.memory * question.utilization
    goal = question.goal
    cache = costs.kv_bytes_per_token(config, question.fmt)
    limits = [f"TTFT within {goal.ttft:g} s"] if goal.ttft else []
    limits += [f"TPOT within {goal.tpot * 1e3:g} ms"] if goal.tpot else []
    measured = question.profile.check(device)
    basis = (
        "kernel times measured on this GPU"
        if measured
        else "kernel times scaled to this GPU from one of its kind"
    )
    if question.profile.npu:
        basis = (
            "fractions of the peaks that published operators reach: estimates, 14 to 51 % too fast "
            "where figures are published (docs/planning.md, Ascend)"
        )
    elif not question.profile.tables and not question.profile.calibrated:
        basis = (
            "no measured kernels for this GPU: times are lower bounds (bytes over "
            "bandwidth, operations over peak), rates upper ones"
        )
    return [
        f"Weights {held.total / 1e9:.1f} GB ({held.routed_experts / 1e9:.1f} in routed "
        f"experts), cache {cache:,} B a token.",
        f"GPUs: {question.count} x {usable / 1e9:.1f} GB usable = "
        f"{question.count * usable / 1e9:,.0f} GB, "
        f"{question.count * device.bandwidth / 1e12:.1f} TB/s; {device.link.span} joined at "
        f"{device.link.bandwidth / 1e9:g} GB/s, "
        f"beyond at {device.network.bandwidth / 1e9:g}.",
        f"Goal: {goal.prompt:,} tokens in, {goal.output:,} "
        f"out{', ' + ', '.join(limits) if limits else ', no limits of time'}. "
        f"Profile {question.profile.name}: {basis}. Routing: {question.routing.kind}.",
    ]


def layout_of(option: Option) -> str:
    """An attention-expert split has no layout, only a ratio, which is in `how`."""
    return (
        option.layout
        if option.kind == "aggregated"
        else option.kind
        if option.kind == "attention:experts"
        else f"{option.kind}: {option.layout}"
    )


def options_table(options: list[Option]) -> Table:
    made = table(
        "layout",
        "x",
        "batch a group",
        "drafts",
        "TTFT s",
        "TPOT ms",
        "tok/s a user",
        "tok/s a GPU",
        "limited by",
        "how",
    )
    for option in options:
        made.add_row(
            layout_of(option) + (" (stale)" if option.stale else ""),
            str(option.replicas),
            str(option.batch),
            str(option.num_speculative_tokens),
            f"{option.ttft:.2f}",
            f"{option.tpot * 1e3:.1f}",
            f"{option.per_user:.1f}",
            f"{option.per_gpu:,.1f}",
            option.limiter,
            option.detail,
        )
    return made


def stale_lines(plan: DeploymentPlan) -> list[str]:
    """Explains the mark `(stale)` of a layout, and how to measure anew."""
    shown = (*plan.options, *plan.missed)
    families = sorted({family for option in shown for family in option.stale})
    if not families:
        return []
    return [
        f"(stale): the times of {', '.join(families)} are of kernels that have changed since, or "
        f"whose source was not kept; `{RENEWAL} --based-on h200 --out FILE` on the GPU renews them."
    ]


def reasons(plan: DeploymentPlan, best: Option) -> list[str]:
    """Why the first is first, in figures."""
    goal = plan.question.goal
    shares = ", ".join(f"{name} {share:.0%}" for name, share in best.shares)
    within = " within the limits" if goal.ttft or goal.tpot else ""
    lines = [
        f"The first because it gives the most tokens a GPU{within}; a decode step is {shares}."
    ]
    others = [
        option
        for option in distinct_best(plan.options, 6)[1:]
        if option.layout != best.layout or option.kind != best.kind
    ]
    if others:
        second = others[0]
        how = (
            f"{best.per_gpu / second.per_gpu - 1:+.0%} tokens a GPU at "
            f"{best.tpot / second.tpot - 1:+.0%} TPOT"
        )
        held = f"weights {best.weight_bytes / 1e9:.1f} and {second.weight_bytes / 1e9:.1f} GB a GPU"
        lines.append(f"Compared with {layout_of(second)}: {how}; {held}.")
    fit = best.cache_tokens // (goal.prompt + goal.output)
    lines.append(
        f"Cache: {best.cache_tokens:,} tokens a group, so at most {fit} requests of this "
        f"length; {best.batch} are used."
    )
    return lines


def none_found(plan: DeploymentPlan) -> list[str]:
    if plan.missed:
        return ["\n[bold]Nothing that fits meets the goal.[/bold]"]
    question = plan.question
    config = question.config
    device = question.device
    usable = device.memory * question.utilization
    held = costs.weight_bytes(config, fmt=question.fmt).total
    lines = ["\n[bold]Nothing fits.[/bold]"]
    if held > usable * question.count:
        lines.append(f"The weights alone need {-(-held // usable):.0f} such GPUs.")
    return lines


def sizes_lines(question: Question, best: Option | None) -> list[str]:
    """Critical sizes that explain the rest."""
    config = question.config
    device = question.device
    moe = question.config.moe
    rows, batch = compute_bound_tokens(config, device)
    one = expert_seconds(config, device) * 1e6
    lines = ["\n[bold]What limits it[/bold]"]
    lines.append(
        f"Experts are bound by memory below {rows:.0f} tokens each, {batch:,.0f} in a step; "
        f"reading one takes {one:.0f} us."
    )
    if best and best.kind != "attention:experts":
        tokens = best.batch * best.sizes.dp * (1 + best.num_speculative_tokens)
        used = distinct_experts(question.routing, moe.num_experts, moe.top_k, tokens)
        each = tokens * moe.top_k / max(used, 1e-9)
        lines.append(
            f"The first decodes {tokens:,} tokens a step: {used:.0f} of "
            f"{moe.num_experts} experts a layer, {each:.1f} tokens each."
        )
    if question.count > device.link.span or device.link.bandwidth < 50e9:
        call = rpc_seconds(config, device, 1)
        many = rpc_seconds(config, device, 128)
        layers = sum(config.moe_layers)
        lines.append(
            f"The network's floor: {call * 1e6:.0f} us to send one token to another node "
            f"and back, {layers * call * 1e3:.1f} ms over "
            f"{layers} MoE layers; 128 tokens take {layers * many * 1e3:.0f} ms at "
            f"{device.network.bandwidth * 8 / 1e9:g} Gb/s."
        )
    return lines


def rejected_lines(plan: DeploymentPlan) -> list[str]:
    """The layouts that came nearest, one a shape, and how many there were."""
    if not plan.rejected:
        return []
    lines = [f"\n[bold]What does not work[/bold] ({len(plan.rejected)} layouts)"]
    seen: set[str] = set()
    for item in plan.rejected:
        sizes = {name: getattr(item.sizes, name) for name in ("tp", "pp", "ep")}
        kind = "".join(name for name, size in sizes.items() if size > 1)
        if kind not in seen and len(seen) < 6:
            seen.add(kind)
            lines.append(f"  {layout_name(item.sizes)}: {item.reason}")
    return lines


def settings(question: Question, option: Option) -> dict[str, Any]:
    """The engine's options of one replica."""
    sizes = option.sizes
    chosen: dict[str, Any] = {"tp": sizes.tp, "dp": sizes.dp, "pp": sizes.pp, "ep": sizes.ep}
    chosen = {name: size for name, size in chosen.items() if size > 1}
    chosen |= {"max_num_seqs": option.batch, "max_num_batched_tokens": question.profile.max_chunk}
    chosen |= {
        "max_model_len": question.goal.prompt + question.goal.output,
        "memory_utilization": question.utilization,
    }
    if question.device.engine_device != "auto":
        chosen["device"] = question.device.engine_device
    if question.fmt.kv_dtype is not None:
        chosen["kv_cache_dtype"] = question.fmt.kv_dtype
    return chosen | (
        {"num_speculative_tokens": option.num_speculative_tokens}
        if option.num_speculative_tokens
        else {}
    )


def commands(model: str, question: Question, option: Option) -> list[str]:
    flags = " ".join(
        f"--{name.replace('_', '-')} {value}" for name, value in settings(question, option).items()
    )
    if option.kind == "attention:experts":
        return [
            f"  {option.detail}: on each expert GPU `rorqual experts {model}` with its part, on "
            "each attention GPU",
            f"  rorqual serve {model} {flags} --experts ADDRESSES",
            "  (docs/design/attention-expert-split.md; times above are with CUDA graphs and a "
            "direct network, which that link does not have yet)",
        ]
    lines = [f"  rorqual serve {model} {flags}"]
    if option.replicas > 1:
        lines.append(f"  {option.replicas} times, on GPUs of their own")
    if option.prefill_sizes:
        lines.append(
            f"  as the decode role; beside {option.prefill_replicas} prefill instances of "
            f"{layout_name(option.prefill_sizes)}"
        )
    return lines


# ---- files


COLUMNS = (
    "kind layout replicas batch num_speculative_tokens ttft_s tpot_ms tok_s_user tok_s_gpu "
    "gpus limiter meets_goal pareto stale detail"
)


def write_csv(plan: DeploymentPlan, path: Path) -> None:
    """Every costed option, the front marked."""
    front = set(map(id, plan.pareto()))
    good = set(map(id, plan.options))
    with io.StringIO(newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS.split())
        for item in (*plan.options, *plan.missed):
            what = (item.kind, item.layout, item.replicas, item.batch, item.num_speculative_tokens)
            figures = (
                round(item.ttft, 4),
                round(item.tpot * 1e3, 3),
                round(item.per_user, 2),
                round(item.per_gpu, 2),
            )
            writer.writerow(
                [
                    *what,
                    *figures,
                    item.gpus,
                    item.limiter,
                    int(id(item) in good),
                    int(id(item) in front),
                    " ".join(item.stale),
                    item.detail,
                ]
            )
        write_whole(path, file.getvalue())


def write_yaml(plan: DeploymentPlan, model: str, path: Path) -> None:
    """The best option as a recipe."""
    import yaml

    if not plan.options:
        raise ConfigError("nothing meets the goal, so there is no recipe to write")
    best = plan.options[0]
    recipe = {
        "model": model,
        "kind": best.kind,
        "replicas": best.replicas,
        "engine": settings(plan.question, best),
    }
    write_whole(path, yaml.safe_dump(recipe, sort_keys=False))


# ---- questions and validation


def show_answer(title: str, lines: list[Line], console: Console) -> None:
    console.print(f"[bold]{title}[/bold]", highlight=False)
    made = table("", "", "")
    made.columns[1].justify = "left"
    for line in lines:
        made.add_row(line.what, line.value, line.how)
    console.print(made)


def show_validation(groups: list[ValidationGroup], console: Console) -> None:
    for group in groups:
        console.print(f"\n[bold]{group.title}[/bold]\n{group.source}", highlight=False)
        if group.origin:
            console.print(group.origin, highlight=False, markup=False)
        if group.stale:
            console.print(f"stale: {', '.join(group.stale)}", highlight=False)
        if group.older:
            console.print(f"steps of older kernels: {', '.join(group.older)}", highlight=False)
        if group.unrecorded:
            console.print("their kernels are not recorded", highlight=False)
        made = table("case", "figure", "published", "predicted", "error", "")
        for point in group.points:
            shown = f"{point.predicted:,.2f}" + (
                f" to {point.high:,.2f}" if point.high is not None else ""
            )
            error = (
                "inside" if point.high is not None and not point.error else f"{point.error:+.1%}"
            )
            label = f"{point.label} (chosen on)" if point.fitted else point.label
            made.add_row(label, point.metric, f"{point.measured:,.2f}", shown, error, point.unit)
        console.print(made)
        if group.kind == "prediction":
            means = ", ".join(
                f"{metric} {group.mean_error(metric):.1%} (worst {group.worst_error(metric):.1%})"
                for metric in group.metrics
            )
            console.print(
                f"mean absolute error: {means}"
                + (f" (target {group.target})" if group.target else ""),
                highlight=False,
            )
        if group.note:
            console.print(group.note, highlight=False)


def show_devices(console: Console) -> None:
    """Every device with its figures and their sources."""
    for name in known_devices():
        device = load_device(name)
        peaks = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in device.flops.items())
        link = device.link
        network = device.network
        console.print(f"\n[bold]{name}[/bold]  {device.title}", highlight=False)
        console.print(
            f"{device.memory / 2**30:.1f} GiB, {device.bandwidth / 1e9:,.0f} GB/s, TFLOP/s {peaks}",
            highlight=False,
        )
        console.print(
            f"{link.span} joined at {link.bandwidth / 1e9:g} GB/s, {link.latency * 1e6:g} us; "
            f"network {network.bandwidth / 1e9:g} GB/s, {network.latency * 1e6:g} us",
            highlight=False,
        )
        for figure, source in device.sources.items():
            console.print(f"  {figure}: {source}", highlight=False, markup=False)

"""Wrong calls made from right ones, to see who notices: the bench is only worth what it refuses.

`mutations` takes recorded calls (operator, args, kwargs) and makes seeded changes of the kinds that
a caller gets wrong. `judge` runs one through the real schema, the Meta kernel, the operator's host
code, an emulation of the operator, and at last compares its values with the right call's.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from tests.emulation.npu_ops.recorder import copied

Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]
Named = dict[str, Any]
Change = tuple[str, Named]  # what was changed, and all arguments by name
Emulate = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]

# Values that a caller may mistake for each other; the second of a pair that the call does not have.
MISTAKEN: dict[str, Sequence[Any]] = {
    "sparse_mode": (0, 3),
    "group_list_type": (0, 1),
    "group_type": (0, -1),
    "split_item": (3, 0),
    "drop_pad_mode": (2, 0),
    "norm_type": (0, 1),
    "renorm": (0, 1),
    "group_select_mode": (0, 1),
    "expert_tokens_num_type": (0, 1),
    "row_idx_type": (0, 1),
    "quant_mode": (-1, 1),
    "activate_left": (True, False),
    "rotary_mode": ("half", "interleave"),
    "cache_mode": ("PA_BSND", "PA_NZ"),
    "input_layout": ("BNSD", "BSND", "TND"),
}
FACTORS = ("scale", "softmax_scale", "scale_value", "routed_scaling_factor")
COUNTS = ("k", "k_group", "group_count", "expert_num", "moe_expert_num", "num_experts", "num_heads")
COUNTS += ("num_query_heads", "num_key_value_heads", "active_num", "ep_world_size", "block_size")
PLANES = [
    ("query", "query_rope"),
    ("key", "key_rope"),
    ("kv_cache", "kr_cache"),
    ("k_cache", "ckv_cache"),
    ("rope_sin", "rope_cos"),
    ("cos", "sin"),
    ("r1", "r2"),
    ("x1", "x2"),
    ("scale", "pertoken_scale"),
    ("scale", "per_token_scale"),
]
WEIGHTS = ("weight", "x2", "weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr")
LOW = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16, torch.float32: torch.float16}
INTEGERS = {torch.int32: torch.int64, torch.int64: torch.int32}


@dataclass(frozen=True)
class WrongCall:
    kind: str
    change: str
    right: int  # which of the recorded calls it was made from
    call: Call

    @property
    def operator(self) -> str:
        return self.call[0]._schema.name.removeprefix("npu::")


def by_name(call: Call) -> Named:
    operator, args, kwargs = call
    return {a.name: v for a, v in zip(operator._schema.arguments, args, strict=False)} | kwargs


def as_call(operator: OpOverload, named: Named) -> Call:
    """Positional as far as they go without a gap; the rest by name."""
    args = []
    rest = dict(named)
    for argument in operator._schema.arguments:
        if argument.kwarg_only or argument.name not in rest:
            break
        args.append(rest.pop(argument.name))
    return operator, tuple(args), rest


def in_full(call: Call) -> Named:
    """Every argument, those left out with the value that the schema gives them."""
    named = by_name(call)
    arguments = call[0]._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return defaults | named


def same_call(one: Call, other: Call) -> bool:
    """Whether a change is none, as leaving out what has its default anyway."""
    mine, theirs = in_full(one), in_full(other)
    if mine.keys() != theirs.keys():
        return False

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return a is b
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(map(equal, a, b))
        return a is b or a == b

    return all(equal(mine[name], theirs[name]) for name in mine)


def tensor_at(value: Any) -> torch.Tensor | None:
    """A tensor, or the only one of a list."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


def replaced(named: Named, name: str, tensor: torch.Tensor) -> Named:
    single = isinstance(named[name], torch.Tensor)
    return named | {name: tensor if single else [tensor]}


def left_out(named: Named) -> Iterator[Change]:
    for name, value in named.items():
        if value is not None:
            yield f"{name} left out", {k: v for k, v in named.items() if k != name}


def renamed(named: Named) -> Iterator[Change]:
    for name in list(named)[1:]:
        new = name.replace("_", "") if "_" in name else f"{name}_"
        yield f"{name} as {new}", {new if k == name else k: v for k, v in named.items()}


def mistaken_value(named: Named) -> Iterator[Change]:
    for name, values in MISTAKEN.items():
        if name in named:
            for value in values:
                if value != named[name]:
                    yield f"{name} {named[name]} -> {value}", named | {name: value}
    for name in FACTORS:
        if isinstance(named.get(name), float):
            yield f"{name} times 1.5", named | {name: named[name] * 1.5}


def off_by_one(named: Named) -> Iterator[Change]:
    for name in COUNTS:
        if isinstance(named.get(name), int) and not isinstance(named[name], bool):
            yield f"{name} + 1", named | {name: named[name] + 1}
    first_last = named.get("active_expert_range")
    if first_last:
        first, last = first_last
        yield "active_expert_range ends early", named | {"active_expert_range": [first, last - 1]}
        yield "active_expert_range shifted", named | {"active_expert_range": [first + 1, last + 1]}


def other_dtype(named: Named) -> Iterator[Change]:
    for name, value in named.items():
        tensor = tensor_at(value)
        dtype = None if tensor is None else (LOW | INTEGERS).get(tensor.dtype)
        if tensor is not None and dtype is not None:
            yield f"{name} as {str(dtype)[6:]}", replaced(named, name, tensor.to(dtype))


def swapped(named: Named) -> Iterator[Change]:
    alike = itertools.combinations([n for n, v in named.items() if isinstance(v, torch.Tensor)], 2)
    pairs = [(a, b) for a, b in alike if named[a].shape == named[b].shape]
    for a, b in dict.fromkeys([*PLANES, *pairs]):
        if named.get(a) is not None and named.get(b) is not None and named[a] is not named[b]:
            yield f"{a} and {b} swapped", named | {a: named[b], b: named[a]}


def transposed(named: Named) -> Iterator[Change]:
    for name in WEIGHTS:
        tensor = tensor_at(named.get(name))
        if tensor is not None and tensor.dim() >= 2:
            turned = tensor.transpose(-1, -2).contiguous()
            yield f"{name} transposed", replaced(named, name, turned)


def lengths(named: Named) -> Iterator[Change]:
    for name, value in named.items():
        if name.startswith("actual_seq") and value is not None:
            values = [int(v) for v in value]
            for step in (1, -1):
                moved = [*values[:-1], values[-1] + step]
                yield f"{name} last {step:+d}", named | {name: moved}
            table = named.get("block_table")
            if table is not None and "kv" in name:
                beyond = table.shape[1] * named["block_size"] + 1
                yield f"{name} beyond the table", named | {name: [beyond, *values[1:]]}
    groups = named.get("group_list")
    if isinstance(groups, torch.Tensor) and groups.dim() == 1:
        for step in (1, -1):
            moved_groups = groups.clone()
            moved_groups[-1] += step
            yield f"group_list last {step:+d}", named | {"group_list": moved_groups}


def narrow_table(named: Named) -> Iterator[Change]:
    table = named.get("block_table")
    if isinstance(table, torch.Tensor) and table.shape[1] > 1:
        yield "block_table without its first column", named | {"block_table": table[:, 1:].clone()}


def short_scale(named: Named) -> Iterator[Change]:
    for name, value in named.items():
        tensor = tensor_at(value)
        if "scale" not in name or tensor is None or tensor.numel() < 2:
            continue
        yield f"{name} missing", named | {name: None}
        yield f"{name} one short", replaced(named, name, tensor[..., :-1].clone())


KINDS: dict[str, Callable[[Named], Iterator[Change]]] = {
    "left out": left_out,
    "renamed": renamed,
    "mistaken value": mistaken_value,
    "off by one": off_by_one,
    "dtype": other_dtype,
    "swapped": swapped,
    "transposed": transposed,
    "lengths": lengths,
    "block table": narrow_table,
    "scale": short_scale,
}


def mutations(calls: Sequence[Call], seed: int, most: int) -> list[WrongCall]:
    """At most so many, no two alike, in turn of every kind that the calls have room for."""
    generator = random.Random(seed)
    waiting: dict[str, list[WrongCall]] = {}
    for kind, changes in KINDS.items():
        made = [
            WrongCall(kind, change, index, as_call(call[0], named))
            for index, call in enumerate(calls)
            for change, named in changes(by_name(call))
        ]
        made = [wrong for wrong in made if not same_call(wrong.call, calls[wrong.right])]
        unique = {(wrong.operator, wrong.change): wrong for wrong in made}
        waiting[kind] = list(unique.values())
        generator.shuffle(waiting[kind])
    turns = itertools.chain.from_iterable(itertools.zip_longest(*waiting.values()))
    return list(itertools.islice((wrong for wrong in turns if wrong is not None), most))


SCHEMA_SAYS = (
    "missing value for argument",
    "Unknown keyword argument",
    "Expected a value of type",
    "positional argument",
    "got an unexpected keyword",
    "multiple values for argument",
)


def fresh(call: Call, device: str | None = None) -> Call:
    """The call on copies of its tensors, so that one written in place stays as it was recorded."""
    operator, args, kwargs = call

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if device else copied(tensor)

    args, kwargs = pytree.tree_map_only(torch.Tensor, copy, (args, kwargs))
    return operator, args, kwargs


def values(call: Call, emulate: Emulate) -> list[torch.Tensor]:
    """What a call gives, and what it writes in place."""
    operator, args, kwargs = fresh(call)
    out = pytree.tree_leaves(emulate(operator, args, kwargs))
    named = by_name((operator, args, kwargs))
    arguments = operator._schema.arguments
    written = [named.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
    return [value for value in [*out, *written] if isinstance(value, torch.Tensor)]


def differ(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], tolerance: float) -> bool:
    if [(t.shape, t.dtype) for t in one] != [(t.shape, t.dtype) for t in other]:
        return True
    for a, b in zip(one, other, strict=True):
        a64, b64 = a.double().nan_to_num(), b.double().nan_to_num()
        size = b64.abs().max().item() if b64.numel() else 0.0
        if a64.numel() and (a64 - b64).abs().max().item() > tolerance * max(size, 1e-6):
            return True
    return False


def run_operator(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operator(*args, **kwargs)


def judge(
    wrong: WrongCall,
    right: Call,
    emulate: Emulate = run_operator,
    tolerance: float = 2**-8,
    on_device: bool = False,
) -> str:
    """Who catches it: 'schema', 'meta', 'host', 'emulation', 'values', or 'nobody'. 'host' is the
    operator's own code before its kernel, which runs where there is a device, a stub's at least.

    The same arguments give the same values bit by bit here, so that the tolerance, a rounding of
    bfloat16 at the largest value, is only for changes that a device's own rounding would hide.
    """
    try:
        operator, args, kwargs = fresh(wrong.call, "meta")
        operator(*args, **kwargs)
    except NotImplementedError:
        pass  # an operator without a Meta kernel
    except Exception as error:
        return "schema" if any(text in str(error) for text in SCHEMA_SAYS) else "meta"
    if on_device:
        try:
            operator, args, kwargs = fresh(wrong.call, "npu")
            operator(*args, **kwargs)
        except Exception:
            return "host"
    expected = values(right, emulate)
    try:
        found = values(wrong.call, emulate)
    except Exception:
        return "emulation"
    return "values" if differ(found, expected, tolerance) else "nobody"


def verdicts(
    calls: Sequence[Call],
    wrong: Iterable[WrongCall],
    emulate: Emulate = run_operator,
    on_device: bool = False,
) -> list[tuple[WrongCall, str]]:
    return [(w, judge(w, calls[w.right], emulate, on_device=on_device)) for w in wrong]


def table(judged: Sequence[tuple[WrongCall, str]]) -> str:
    lines = [f"{w.kind:16}{w.operator:36}{w.change:44}{caught}" for w, caught in judged]
    counted = Counter(caught for _, caught in judged)
    share = ", ".join(f"{name} {number}" for name, number in counted.most_common())
    return "\n".join([*lines, f"{len(judged)} wrong calls: {share}"])

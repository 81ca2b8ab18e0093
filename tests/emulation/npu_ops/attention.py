"""Fused attention over dense and paged keys and values."""

from __future__ import annotations

from typing import Any

import torch

from .core import BF16, F16, F32, I8, I32, Checks

Tensor = torch.Tensor
FULL = 2147483647
# layout of the inputs, layout of the output
LAYOUTS = {
    "BSH": ("BSH", "BSH"),
    "BSND": ("BSND", "BSND"),
    "BNSD": ("BNSD", "BNSD"),
    "BNSD_BSND": ("BNSD", "BSND"),
    "TND": ("TND", "TND"),
    "TND_NTD": ("TND", "NTD"),
    "NTD_TND": ("NTD", "TND"),
}


def _tokens_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """[T, N, D] or [B, S, N, D]."""
    if layout == "BSH":
        return x.unflatten(-1, (heads, -1))
    if layout == "BNSD":
        return x.transpose(1, 2)
    return x.transpose(0, 1) if layout == "NTD" else x


def _cumulative(c: Checks, name: str, ends: list[int] | None, total: int) -> list[int]:
    c.need(ends is not None and len(ends) > 0, name, "TND and NTD layouts need it")
    assert ends is not None
    lengths = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    c.need(all(n >= 0 for n in lengths), name, "must be cumulative: an entry is below its last")
    c.need(ends[-1] == total, name, f"ends at {ends[-1]}, the tensor has {total} rows")
    return lengths


def _each(c: Checks, name: str, given: list[int] | None, batch: int, longest: int) -> list[int]:
    if given is None:
        return [longest] * batch
    c.need(len(given) in (1, batch), name, f"{len(given)} entries for {batch} requests")
    lengths = list(given) * (batch if len(given) == 1 else 1)
    c.need(all(0 <= n <= longest for n in lengths), name, f"a length is outside [0, {longest}]")
    return lengths


def _page_rows(c: Checks, name: str, x: Tensor, heads: int, block: int, width: int) -> Tensor:
    """A paged tensor in any of its layouts as [blocks, block, N, D]."""
    c.contiguous(name, x)
    lane = 32 if x.dtype is I8 else 16
    if x.dim() == 3:
        c.shape(name, x, x.shape[0], block, heads * width)
        return x.unflatten(-1, (heads, width))
    if x.dim() == 4:
        c.shape(name, x, x.shape[0], heads, block, width)
        return x.transpose(1, 2)
    c.rank(name, x, 3, 4, 5)
    c.shape(name, x, x.shape[0], heads, width // lane, block, lane)
    c.need(block != 16, "block_size", "NZ pages need 128")
    return x.permute(0, 3, 1, 2, 4).flatten(-2)


def _mask_of(
    c: Checks,
    mode: int,
    mask: Tensor | None,
    rows: int,
    length: int,
    request: int,
    tokens: tuple[int, int],
) -> Tensor | None:
    """True where nothing is seen."""
    if mask is None:
        return None
    if mode == 0:
        full = mask.bool()
        full = full.reshape(-1, *full.shape[-2:])
        full = full[request if full.shape[0] > 1 else 0]
        enough = full.shape[0] >= rows and full.shape[1] >= length
        c.need(enough, "atten_mask", f"{tuple(mask.shape)} for {rows} by {length}")
        return full[:rows, :length]
    shift = torch.arange(length) - torch.arange(rows).unsqueeze(1)
    if mode == 2:
        return shift > 0
    if mode == 3:
        return shift > length - rows
    shift = shift - (length - rows)
    return (shift > tokens[1]) | (shift < -tokens[0])


def _sparse_checks(c: Checks, mode: int, mask: Tensor | None, tokens: tuple[int, int]) -> None:
    c.choice("sparse_mode", mode, 0, 2, 3, 4)
    if mask is not None:
        c.need(mask.dtype in (torch.bool, I8, torch.uint8), "atten_mask", f"dtype {mask.dtype}")
        c.contiguous("atten_mask", mask)
    if mode == 0:
        if mask is not None:
            c.need(tokens == (FULL, FULL), "pre_tokens", "bounds beside a mask are not emulated")
        return
    c.need(mask is not None, "atten_mask", f"sparse_mode {mode} needs the 2048 by 2048 mask")
    assert mask is not None
    shape = tuple(mask.shape)
    side = (2048, 2048)
    c.need(shape in (side, (1, *side), (1, 1, *side)), "atten_mask", f"{shape}, must be {side}")
    above = torch.ones(side, dtype=torch.bool).triu(1)
    c.need(torch.equal(mask.bool().view(side), above), "atten_mask", "is not 1 above the diagonal")
    if mode == 4:
        c.need(tokens[0] + tokens[1] >= 0, "pre_tokens", "pre_tokens + next_tokens is negative")


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """query [s, N, D], key and value [L, Nkv, D]: out [s, N, Dv] and lse [s, N], float32."""
    repeat = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeat, 1)
    value = value.repeat_interleave(repeat, 1)
    scores = torch.einsum("snd,lnd->nsl", query, key) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return torch.einsum("nsl,lnd->snd", weights, value), lse.t()


def _latent_rules(c: Checks, p: dict[str, Any], lengths: list[int], heads: int, kv: int) -> None:
    c.need(p["block_table"] is not None, "block_table", "D 512 with rope needs paging")
    c.choice("num_query_heads", heads, 1, 2, 4, 8, 16, 32, 64, 128)
    c.need(kv == 1, "num_key_value_heads", f"{kv}, must be 1 beside rope of D 512")
    c.need(all(n <= 16 for n in lengths), "query", "more than 16 rows of one request")
    several = max(lengths, default=0) > 1
    if several:
        right = p["sparse_mode"] == 3 and p["atten_mask"] is not None
        c.need(right, "sparse_mode", "several rows a request need sparse_mode 3 and its mask")
    elif not p["input_layout"].startswith("TND"):
        right = p["sparse_mode"] == 0 and p["atten_mask"] is None
        c.need(right, "sparse_mode", "one row a request needs sparse_mode 0 and no mask")


def _quantised(c: Checks, p: dict[str, Any], rows: int, heads: int, query: Tensor) -> Tensor:
    """The query with its scale and the key's applied."""
    c.need(p["query_rope"] is not None, "query_rope", "int8 attention without rope")
    c.choice("query_quant_mode", p["query_quant_mode"], 3)
    c.choice("key_quant_mode", p["key_quant_mode"], 0)
    c.choice("value_quant_mode", p["value_quant_mode"], 0)
    for name in ("dequant_scale_query", "dequant_scale_key", "dequant_scale_value"):
        c.need(p[name] is not None, name, "int8 attention needs it")
        c.dtype(name, p[name], F32)
    for name in ("dequant_scale_key", "dequant_scale_value"):
        c.need(p[name].numel() == 1, name, "per-tensor: one value")
    scale = p["dequant_scale_query"]
    flat = p["layout"] in ("TND", "NTD")
    if flat and scale.dim() == 3 and scale.shape[-1] == 1:
        scale = scale.squeeze(-1)
    wanted = tuple(query.shape[:-1])
    if p["layout"] == "BNSD":
        c.need(scale.dim() >= 3, "dequant_scale_query", f"shape {tuple(scale.shape)}")
        scale = scale.reshape(query.shape[0], heads, -1).transpose(1, 2)
    elif p["layout"] == "NTD":
        scale = scale.t()
    c.need(scale.numel() == rows * heads, "dequant_scale_query", f"{scale.numel()} values")
    return query.float() * scale.reshape(wanted).unsqueeze(-1) * p["dequant_scale_key"].reshape(())


def _split(x: Tensor, lengths: list[int], flat: bool) -> list[Tensor]:
    if flat:
        return list(x.split(lengths))
    return [x[i, :n] for i, n in enumerate(lengths)]


def _attention(c: Checks, p: dict[str, Any]) -> tuple[Tensor, Tensor]:
    c.choice("input_layout", p["input_layout"], *LAYOUTS)
    layout, out_layout = LAYOUTS[p["input_layout"]]
    p["layout"] = layout
    query, key, value = p["query"], p["key"], p["value"]
    heads = p["num_query_heads"]
    kv_heads = p["num_key_value_heads"] or heads
    c.need(heads % kv_heads == 0, "num_key_value_heads", f"{kv_heads} of {heads} heads")
    c.need(heads // kv_heads <= 64 or kv_heads == 1, "num_key_value_heads", "ratio above 64")
    int8 = query.dtype is I8
    c.dtype("query", query, BF16, F16, I8)
    c.contiguous("query", query)
    for name, x in (("key", key), ("value", value)):
        c.same_dtype(name, x, query)
        c.contiguous(name, x)
    rope, key_rope = p["query_rope"], p["key_rope"]
    c.need((rope is None) == (key_rope is None), "key_rope", "query_rope and key_rope go together")
    c.rank("query", query, 4 if len(layout) == 4 else 3)
    c.need(layout != "BSH" or query.shape[-1] % heads == 0, "query", f"H is not of {heads} heads")
    q = _tokens_first(query, layout, heads)
    c.need(q.shape[-2] == heads, "num_query_heads", f"{heads}, query has {q.shape[-2]}")
    width = q.shape[-1]
    flat = layout in ("TND", "NTD")
    batch = q.shape[0]
    if flat:
        lengths = _cumulative(c, "actual_seq_qlen", p["qlen"], q.shape[0])
        batch = len(lengths)
    else:
        lengths = _each(c, "actual_seq_qlen", p["qlen"], batch, q.shape[1])
    latent = rope is not None and (p["block_table"] is not None)
    rows = q.numel() // max(heads * width, 1)
    if int8:
        wide = _quantised(c, p, rows, heads, q)
    else:
        wide = q.float()
        for name in ("dequant_scale_query", "dequant_scale_key", "dequant_scale_value"):
            c.need(p.get(name) is None, name, "only with int8 query and key")
    if rope is not None:
        c.dtype("query_rope", rope, BF16, F16)
        c.contiguous("query_rope", rope)
        c.rank("query_rope", rope, query.dim())
        turned = _tokens_first(rope, layout, heads)
        c.need(turned.shape[:-1] == q.shape[:-1], "query_rope", "other rows or heads than query")
        c.width("query_rope", turned.shape[-1], 64)
        c.width("query", width, 512, 128)
        c.same_dtype("key_rope", key_rope, rope)
        wide = torch.cat((wide, turned.float()), -1)
    if latent:
        c.width("query", width, 512)
        _latent_rules(c, p, lengths, heads, kv_heads)
    elif rope is not None:
        c.width("query", width, 128)
        c.choice("input_layout", p["input_layout"], "TND", "NTD_TND")
    tokens = (p["pre_tokens"], p["next_tokens"])
    _sparse_checks(c, p["sparse_mode"], p["atten_mask"], tokens)
    if p["block_table"] is not None:
        keys, values = _paged(c, p, kv_heads, batch, width, rope)
    else:
        keys, values = _dense(c, p, kv_heads, batch, flat, width, rope)
    working = rope.dtype if int8 else query.dtype
    value_width = values[0].shape[-1] if values else width
    out = torch.zeros(*q.shape[:-1], value_width)
    lse = torch.full((*q.shape[:-1],), float("inf"))
    outs = _split(out, lengths, flat)
    sums = _split(lse, lengths, flat)
    for i, one in enumerate(_split(wide, lengths, flat)):
        n, length = one.shape[0], keys[i].shape[0]
        if not n or not length:
            continue
        if p["sparse_mode"] == 3:
            c.need(length >= n, "actual_seq_kvlen", f"{length} keys for {n} rows of request {i}")
        hidden = _mask_of(c, p["sparse_mode"], p["atten_mask"], n, length, i, tokens)
        key_of = keys[i].float()
        found, total = _attend(one, key_of, values[i].float(), p["softmax_scale"], hidden)
        if int8:
            found = found * p["dequant_scale_value"].reshape(())
        outs[i].copy_(found)
        sums[i].copy_(total)
    return _shaped(out.to(working), out_layout), _lse(lse, p, flat)


def _shaped(out: Tensor, layout: str) -> Tensor:
    if layout == "BSH":
        return out.flatten(-2)
    if layout == "BNSD":
        return out.transpose(1, 2).contiguous()
    return out.transpose(0, 1).contiguous() if layout == "NTD" else out


def _lse(lse: Tensor, p: dict[str, Any], flat: bool) -> Tensor:
    if not p["return_softmax_lse"]:
        return torch.empty(0)
    return lse.unsqueeze(-1) if flat else lse.transpose(1, 2).unsqueeze(-1).contiguous()


def _with_rope(keys: Tensor, turned: Tensor | None) -> Tensor:
    """The query carries the scales of an int8 key already; rope parts are never quantised."""
    wide = keys.float()
    return wide if turned is None else torch.cat((wide, turned.float()), -1)


def _paged(
    c: Checks, p: dict[str, Any], heads: int, batch: int, width: int, rope: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    table, block = p["block_table"], p["block_size"]
    c.dtype("block_table", table, I32)
    c.rank("block_table", table, 2)
    c.need(table.shape[0] == batch, "block_table", f"{table.shape[0]} rows for {batch} requests")
    if rope is not None:
        c.choice("block_size", block, 16, 128)
    else:
        c.need(block > 0 and block % 128 == 0 and block <= 512, "block_size", f"{block}")
    c.need(p["kvlen"] is not None, "actual_seq_kvlen", "paging needs it")
    room = table.shape[1] * block
    lengths = _each(c, "actual_seq_kvlen", p["kvlen"], batch, room)
    c.need(len(p["kvlen"]) == batch, "actual_seq_kvlen", "one length a request, not cumulative")
    c.need(p["key"].shape == p["value"].shape, "value", "other shape than key")
    pages = _page_rows(c, "key", p["key"], heads, block, width)
    shown = _page_rows(c, "value", p["value"], heads, block, width)
    turned = None
    if rope is not None:
        rope_width = rope.shape[-1] // (p["num_query_heads"] if p["layout"] == "BSH" else 1)
        turned = _page_rows(c, "key_rope", p["key_rope"], heads, block, rope_width)
        c.need(turned.shape[0] == pages.shape[0], "key_rope", "other blocks than key")
        c.need(p["key_rope"].dim() == p["key"].dim(), "key_rope", "other layout than key")
    keys, values = [], []
    for row, length in zip(table, lengths, strict=True):
        used = row[: (length + block - 1) // block].long()
        c.ids("block_table", used, 0, pages.shape[0])
        c.unique("block_table", used)
        ropes = None if turned is None else turned[used].flatten(0, 1)[:length]
        keys.append(_with_rope(pages[used].flatten(0, 1)[:length], ropes))
        values.append(shown[used].flatten(0, 1)[:length])
    return keys, values


def _dense(
    c: Checks,
    p: dict[str, Any],
    heads: int,
    batch: int,
    flat: bool,
    width: int,
    rope: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    layout = p["layout"]
    key, value = p["key"], p["value"]
    c.rank("key", key, p["query"].dim())
    c.rank("value", value, p["query"].dim())
    k = _tokens_first(key, layout, heads)
    v = _tokens_first(value, layout, heads)
    c.need(k.shape[-2] == heads, "num_key_value_heads", f"{heads}, key has {k.shape[-2]}")
    c.need(k.shape[-1] == width, "key", f"D {k.shape[-1]}, query has {width}")
    c.need(v.shape[:-1] == k.shape[:-1], "value", "other rows or heads than key")
    if flat:
        lengths = _cumulative(c, "actual_seq_kvlen", p["kvlen"], k.shape[0])
        c.need(len(lengths) == batch, "actual_seq_kvlen", f"{len(lengths)} for {batch} requests")
        if rope is None:
            c.width("query", width, 64, 128, 192)
            c.width("value", v.shape[-1], 64, 128, 192)
    else:
        c.need(k.shape[0] == batch, "key", f"{k.shape[0]} requests, query has {batch}")
        lengths = _each(c, "actual_seq_kvlen", p["kvlen"], batch, k.shape[1])
    keys = k.float()
    if rope is not None:
        turned = _tokens_first(p["key_rope"], layout, heads)
        c.need(turned.shape[:-1] == k.shape[:-1], "key_rope", "other rows or heads than key")
        q_rope = _tokens_first(rope, layout, p["num_query_heads"])
        c.need(turned.shape[-1] == q_rope.shape[-1], "key_rope", "other width than query_rope")
        keys = torch.cat((keys, turned.float()), -1)
    return _split(keys, lengths, flat), _split(v, lengths, flat)


_REFUSED_V2 = (
    "pse_shift",
    "dequant_offset_key",
    "dequant_offset_value",
    "dequant_scale_key_rope",
    "quant_scale_out",
    "quant_offset_out",
    "quant_scale_p",
    "learnable_sink",
    "query_dtype",
    "key_dtype",
    "value_dtype",
    "query_rope_dtype",
    "key_rope_dtype",
    "key_shared_prefix_dtype",
    "value_shared_prefix_dtype",
    "dequant_scale_query_dtype",
    "dequant_scale_key_dtype",
    "dequant_scale_value_dtype",
    "dequant_scale_key_rope_dtype",
    "out_dtype",
)
_REFUSED_V1 = (
    "pse_shift",
    "dequant_scale1",
    "quant_scale1",
    "dequant_scale2",
    "quant_scale2",
    "quant_offset2",
    "antiquant_scale",
    "antiquant_offset",
    "query_padding_size",
    "kv_padding_size",
    "key_antiquant_scale",
    "key_antiquant_offset",
    "value_antiquant_scale",
    "value_antiquant_offset",
    "key_shared_prefix",
    "value_shared_prefix",
    "actual_shared_prefix_len",
    "key_rope_antiquant_scale",
)


def _list(c: Checks, name: str, lengths: Any) -> list[int] | None:
    if isinstance(lengths, torch.Tensor):
        c.need(lengths.dtype is torch.int64, name, f"dtype {lengths.dtype}, must be int64")
        c.rank(name, lengths, 1)
        return [int(n) for n in lengths]
    return None if lengths is None else [int(n) for n in lengths]


def _defaults(options: dict[str, Any]) -> dict[str, Any]:
    given = {
        "query_rope": None,
        "key_rope": None,
        "atten_mask": None,
        "block_table": None,
        "num_key_value_heads": 0,
        "pre_tokens": FULL,
        "next_tokens": FULL,
        "input_layout": "BSH",
        "sparse_mode": 0,
        "block_size": 0,
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "value_quant_mode": 0,
    }
    return given | options


def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """query, key, value bfloat16, float16 or all int8, contiguous; layouts BSH, BSND, BNSD,
    BNSD_BSND, TND, TND_NTD, NTD_TND; actual_seq_qlen and, without paging, actual_seq_kvlen are
    cumulative for T layouts and end at T, else one a request; with block_table (int32 [B, n])
    actual_seq_kvlen is one a request; pages [blocks, block, N*D], [blocks, N, block, D] or NZ
    [blocks, N, D/16, block, 16] (int8: 32); sparse_mode 2, 3, 4 with the 2048 by 2048 mask, 1 above
    the diagonal; with rope: D 512 paged (block 16 or 128, NZ 128 only, one key head, at most 16
    rows a request, sparse 0 without a mask for one row, 3 with it for more) or D 128 dense; int8:
    query_quant_mode 3 with dequant_scale_query a row and head, one key and one value scale [doc].

    The page excludes paging from TND and int8 from T layouts in one place and lists both in
    others; both are accepted [reading]. sparse 3 allows as many keys as rows, where the page
    writes fewer rows than keys [reading]. Band bounds count from the lower right corner
    [reading]. Rows past a request's length are 0, their lse inf [reading]. block_table entries
    past a request's length are not read. Without return_softmax_lse the second output has shape
    (0,) [meta; the page says (1,)].
    """
    c = Checks("npu_fused_infer_attention_score_v2")
    for name in _REFUSED_V2:
        c.absent(**{name: options.pop(name, None)})
    c.choice("inner_precise", options.pop("inner_precise", 0), 0, 1)
    p = _defaults(options) | {"query": query, "key": key, "value": value}
    p["qlen"] = _list(c, "actual_seq_qlen", p.pop("actual_seq_qlen", None))
    p["kvlen"] = _list(c, "actual_seq_kvlen", p.pop("actual_seq_kvlen", None))
    for name, default in (("num_query_heads", 1), ("softmax_scale", 1.0)):
        p.setdefault(name, default)
    p.setdefault("return_softmax_lse", False)
    for name in ("dequant_scale_query", "dequant_scale_key", "dequant_scale_value"):
        p.setdefault(name, None)
    return _attention(c, p)


def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """As v2 under its older names (num_heads, scale, actual_seq_lengths, actual_seq_lengths_kv,
    softmax_lse_flag), without int8 [doc]."""
    c = Checks("npu_fused_infer_attention_score")
    for name in _REFUSED_V1:
        c.absent(**{name: options.pop(name, None)})
    for name in ("antiquant_mode", "key_antiquant_mode", "value_antiquant_mode"):
        c.choice(name, options.pop(name, 0), 0)
    c.choice("inner_precise", options.pop("inner_precise", 0), 0, 1)
    c.need(query.dtype is not I8, "query", "int8 is not emulated in the first version")
    p = _defaults(options) | {"query": query, "key": key, "value": value}
    p["qlen"] = _list(c, "actual_seq_lengths", p.pop("actual_seq_lengths", None))
    p["kvlen"] = _list(c, "actual_seq_lengths_kv", p.pop("actual_seq_lengths_kv", None))
    p["num_query_heads"] = p.pop("num_heads", 1)
    p["softmax_scale"] = p.pop("scale", 1.0)
    p["return_softmax_lse"] = p.pop("softmax_lse_flag", False)
    return _attention(c, p)

"""What a rank holds: its window of every tensor, from a file or from a seed, and no byte of
another's. One process plays all ranks, since building and loading need no collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rorqual.cache.spec import kv_spec
from rorqual.config.hf import read_config, read_config_file
from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig, check_parallel
from rorqual.errors import ConfigError, LoadError
from rorqual.layers.parameter import Build, Target
from rorqual.models import loader
from rorqual.models.loader import load_weights, random_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.models.weight_reader import FilePart
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.reference import Weight, dequantize
from rorqual.parallel.mesh import Mesh
from tests.models.checkpoints import dequantize_block, merge, save, save_fp8
from tests.parallel.fake_axes import place

CPU = torch.device("cpu")
WIDE = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 130,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 40,
    "v_head_dim": 128,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 64,
}
FP8 = {
    **WIDE,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
}
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "mlp_only_layers": [0],
    "max_position_embeddings": 64,
}
SIZES: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 4, "ep": 2},
    {"dp": 4, "ep": 4, "dense_tp": 2, "head_tp": 4, "embed_tp": 2},
    {"tp": 2, "pp": 2, "dense_tp": 1},
]


def build(
    config: ModelConfig, mesh: Mesh | None = None, dtype: torch.dtype = torch.float32
) -> Transformer:
    return make_model(
        config,
        Build(CpuOps(native=False), dtype, CPU, config.quant, mesh=mesh or Mesh.single()),
        64,
    )


def own(model: Transformer) -> list[Target]:
    return [target for target in model.targets() if not target.covers and target.view.numel()]


def expanded(tensor: Tensor, target: Target) -> Tensor:
    return tensor.repeat_interleave(target.repeat, 0) if target.repeat > 1 else tensor


def window(target: Target) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + length)
        for start, length in zip(target.origin, target.view.shape, strict=True)
    )


def in_file(model: Transformer) -> dict[str, Tensor]:
    """Tensors of an unsharded model in the shape of its file."""
    found = {}
    for target in own(model):
        found[target.name] = target.view if target.repeat == 1 else target.view[:: target.repeat]
        assert found[target.name].shape == target.shape
    return found


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("fields", [WIDE, FP8, QWEN], ids=["v3", "fp8", "qwen"])
def test_random_shards_are_windows_of_the_unsharded_draw(
    fields: dict[str, Any], sizes: dict[str, Any]
) -> None:
    """Bit for bit, and the windows of all ranks cover every element of every tensor."""
    config = read_config(fields)
    chosen = ParallelConfig(**sizes)
    check_parallel(config, chosen)
    whole = build(config)
    random_weights(whole, 7)
    tensors = in_file(whole)
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
    for rank in range(chosen.world):
        model = build(config, place(chosen, rank))
        random_weights(model, 7)
        for target in own(model):
            assert torch.equal(
                target.view.float(), expanded(tensors[target.name], target)[window(target)].float()
            ), target.name
            marks = expanded(seen[target.name], target).clone()
            marks[window(target)] = True
            seen[target.name] |= marks[:: target.repeat]
    assert [name for name, marks in seen.items() if not marks.all()] == []


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Values that are read: of a mapping, those that are picked."""
    real = loader.fill
    sizes = []

    def counting(pieces: list[FilePart], *rest: Any) -> None:
        for piece in pieces:
            found = torch.empty(piece.shape, device="meta")
            sizes.append(found.numel() if piece.inner is None else found[:, piece.inner].numel())
        real(pieces, *rest)

    monkeypatch.setattr(loader, "fill", counting)
    return sizes


FILES = [
    ("v3", False),
    ("v3", True),
    ("qwen-bias", False),
    ("qwen-bias", True),
    ("v3-tied", False),
    ("fp8", False),
    ("fp8-aligned", False),
]


@pytest.mark.parametrize(
    ("option", "merged"), FILES, ids=[f"{option}{'-merged' * merged}" for option, merged in FILES]
)
def test_each_rank_reads_its_shard_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, merged: bool
) -> None:
    save_fp8(option, tmp_path) if option.startswith("fp8") else save(option, tmp_path)
    if merged:
        merge(tmp_path)
    config = read_config_file(tmp_path)
    tensors = in_file(as_loaded(config, tmp_path))
    reads = count_reads(monkeypatch)
    for sizes in SIZES if config.quant is None else WHOLE_BLOCKS:
        chosen = ParallelConfig(**sizes)
        if config.tie_embeddings and chosen.embed_tp != chosen.head_tp:
            continue
        for rank in range(chosen.world):
            reads.clear()
            model = as_loaded(config, tmp_path, place(chosen, rank))
            for target in own(model):
                assert torch.equal(
                    target.view.float(),
                    expanded(tensors[target.name], target)[window(target)].float(),
                ), target.name
            held = sum(target.view.numel() for target in own(model) if target.repeat == 1)
            scales = sum(target.view.numel() for target in own(model) if target.repeat > 1)
            assert held <= sum(reads) <= held + scales


# Cuts of ragged fp8 checkpoints: experts, layers and vocabulary, no columns inside a block.
WHOLE_BLOCKS = [{"dp": 2, "ep": 2}, {"pp": 2}, {"dp": 4, "ep": 4, "head_tp": 4}]


def as_loaded(config: ModelConfig, folder: Path, mesh: Mesh | None = None) -> Transformer:
    """Not finalized: weights as the file has them."""
    model = build(config, mesh)
    model.finalize = lambda: None  # type: ignore[method-assign]
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_fp8_scales_are_cut_with_their_weights(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """A file with a different scale in every block: each shard, dequantized, is the window of
    the whole, dequantized."""
    config = read_config(FP8)
    chosen = ParallelConfig(**sizes)
    drawn = build(config)
    drawn.finalize = lambda: None  # type: ignore[method-assign]
    random_weights(drawn, 1)
    tensors = {name: tensor.contiguous() for name, tensor in in_file(drawn).items()}
    generator = torch.Generator().manual_seed(2)
    scales = {
        name: torch.rand(tensor.shape, generator=generator) + 0.5
        for name, tensor in tensors.items()
        if name.endswith("_scale_inv")
    }
    save_file(tensors | scales, tmp_path / "model.safetensors")
    wide = {
        name: dequantize_block(tensors[name], scales[name + "_scale_inv"])
        for name in tensors
        if name + "_scale_inv" in scales
    }
    for rank in range(chosen.world):
        model = as_loaded(config, tmp_path, place(chosen, rank))
        views = {target.name: target for target in own(model)}
        for name, target in views.items():
            if name in wide:
                scale = views[name + "_scale_inv"]
                rows = 1 if scale.repeat > 1 else 128
                weight = dequantize(Weight(target.view, scale.view, (rows, 128)), torch.float32)
                assert torch.equal(weight, wide[name][window(target)]), name


def test_fp8_rows_may_be_cut_inside_a_block() -> None:
    """Query heads of 56 rows: two ranks meet in one block, and both keep its scale for each of
    their rows."""
    model = build(read_config(FP8), place(ParallelConfig(tp=2), 1))
    queries = next(
        target
        for target in own(model)
        if target.name.endswith("0.self_attn.q_b_proj.weight_scale_inv")
    )
    assert (queries.shape, queries.repeat, queries.origin, tuple(queries.view.shape)) == (
        (2, 1),
        128,
        (112, 0),
        (112, 1),
    )


def test_fp8_logits_of_two_ranks_are_those_of_one() -> None:
    """Partial sums of one layer's products added by hand: scales travel with their blocks,
    whatever the cut."""
    config = read_config(FP8)
    models = [build(config, place(ParallelConfig(tp=2), rank)) for rank in range(2)]
    whole = build(config)
    for model in (whole, *models):
        random_weights(model, 3)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = whole.layers[0].mlp.forward(x)
        parts = [model.layers[0].mlp.forward(x) for model in models]
    assert (parts[0] + parts[1] - want).abs().max() < 1e-5 * want.abs().max()
    assert (parts[0] - want).abs().max() > 0.1 * want.abs().max()


def test_a_checkpoint_without_another_ranks_expert_is_refused_by_every_rank(tmp_path: Path) -> None:
    save("qwen", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.15.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for rank in range(2):
        with pytest.raises(LoadError, match=r"lacks model\.layers\.1\.mlp\.experts\.15\.up_proj"):
            load_weights(
                build(read_config_file(tmp_path), place(ParallelConfig(dp=2, ep=2), rank)),
                tmp_path,
            )


def test_memory_of_a_rank(tmp_path: Path) -> None:
    """Experts and heads are divided; what every rank repeats is the router, norms and latent
    projections."""
    config = read_config(WIDE)
    whole, part = (build(config, mesh) for mesh in (None, place(ParallelConfig(tp=4), 0)))

    def held(model: Transformer, name: str) -> int:
        return sum(target.view.numel() for target in own(model) if name in target.name)

    for name in ("experts", "o_proj", "kv_b_proj", "q_b_proj", "gate_proj", "down_proj"):
        assert held(whole, name) == 4 * held(part, name), name
    for name in ("norm", "q_a_proj", "kv_a_proj", "mlp.gate."):
        assert held(whole, name) == held(part, name), name
    # 130 entries: 33, 33, 33, 31
    assert held(part, "lm_head") == held(part, "embed_tokens") == 33 * 256
    assert held(build(config, place(ParallelConfig(tp=4), 3)), "lm_head") == 31 * 256


def test_cache_of_a_rank() -> None:
    """Keys and values per head are divided down to one head a rank; the latent is whole on each;
    a stage holds its own layers."""
    qwen = read_config(QWEN)
    v3 = read_config(WIDE)
    spec = kv_spec(qwen, 16, "bfloat16")
    assert [plane.shape for plane in spec.shard(2).layers[0]] == [(1, 24), (1, 24)]
    assert spec.shard(4) == spec.shard(2)
    assert spec.shard(2).bytes_per_token * 2 == spec.bytes_per_token
    latent = kv_spec(v3, 16, "bfloat16")
    assert latent.shard(4) == latent
    assert [plane.shape for plane in kv_spec(v3, 16, "bfloat16", "CD").shard(2).layers[0]] == [
        (2, 56),
        (2, 128),
    ]
    assert len(spec.shard(1, range(2, 3)).layers) == 1


# ---- what is refused


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp": 0}, "tp=0"),
        ({"tp": 2, "dp": 2, "dense_tp": 3}, "dense_tp=3 does not divide the 4 ranks"),
        ({"tp": 4, "dp": 3, "dense_tp": 6}, "dense_tp=6 neither divides nor is a multiple of tp=4"),
        ({"dp": 2, "exchange": "local"}, "exchange='local' needs dp=1, got dp=2"),
        ({"tp": 2, "exchange": "local", "sequence_parallel": True}, "not with sequence_parallel"),
        ({"dp": 2, "ep": 2, "exchange": "allgather_tp"}, "needs ep=1, got ep=2"),
        ({"dp": 2, "exchange": "alltoall"}, "needs ep of at least 2"),
        ({"exchange": "nccl"}, "exchange='nccl' is not known"),
        ({"dp": 2, "redundant_experts": 2}, "redundant_experts=2 needs ep of at least 2"),
        ({"dp": 2, "ep": 2, "redundant_experts": -2}, "redundant_experts=-2 must be an integer"),
    ],
)
def test_sizes_that_do_not_fit_together(sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**sizes)


@pytest.mark.parametrize(
    ("fields", "sizes", "words"),
    [
        (QWEN, {"tp": 3}, "tp=3 does not divide the model's 8 attention heads"),
        (
            {**QWEN, "num_key_value_heads": 4, "num_attention_heads": 24},
            {"tp": 6},
            "neither divides nor is a multiple of",
        ),
        (QWEN, {"dp": 16, "ep": 16}, "ep=16 does not divide the model's 8 experts"),
        (
            QWEN,
            {"dp": 4, "ep": 4, "redundant_experts": 6},
            "must divide the 14 slots.*accepted: 0, 4, 8 ... up to 24",
        ),
        (QWEN, {"dp": 2, "ep": 2, "redundant_experts": 10}, "must divide the 18 slots"),
        (QWEN, {"pp": 4}, "pp=4 exceeds the model's 3 layers"),
        (
            {**QWEN, "tie_word_embeddings": True},
            {"dp": 2, "head_tp": 2},
            "embed_tp=1 and head_tp=2 must be equal",
        ),
        (FP8, {"dp": 4}, "expert_tp=4 cuts an expert of 256 columns inside an fp8 block of 128"),
        (
            {**FP8, "v_head_dim": 64},
            {"tp": 4, "dense_tp": 1, "ep": 4},
            "tp=4 cuts the attention output of 256 columns",
        ),
    ],
)
def test_models_that_cannot_be_cut_so(
    fields: dict[str, Any], sizes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_parallel(read_config(fields), ParallelConfig(**sizes))


def test_pipeline_stages_share_the_layers() -> None:
    sizes = ParallelConfig(pp=4)
    assert [list(sizes.stage_layers(10, rank)) for rank in range(4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
        [8, 9],
    ]
    assert [len(sizes.stage_layers(61, rank)) for rank in range(4)] == [16, 15, 15, 15]

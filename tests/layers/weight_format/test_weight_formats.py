"""One matrix in every format: whole, cut by rows and by columns, and at another rank; and tiny
checkpoints against transformers on the values that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rorqual.config.hf import _Reader
from rorqual.config.quant import QUANTIZATIONS, WIDE, WeightScheme
from rorqual.config.quant_methods import read_quantization
from rorqual.errors import ConfigError, LoadError
from rorqual.layers.parameter import Build, Window
from rorqual.layers.weight_format.base import Matrix
from rorqual.layers.weight_format.select import format_of
from rorqual.models.loader import TargetsByName, _draw
from rorqual.models.transformer import Transformer
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import Ops
from rorqual.ops.reference import Weight, dequantize
from tests.layers.weight_format.wide_rows import wide_rows
from tests.layers.weight_format.writers import FORMATS, save_quantized, stored
from tests.models.driver import all_logits, load

BOUND = 1e-4
LENGTH = 12
THREADS = 3
BUILD = Build(Ops(), torch.float32, torch.device("cpu"))
EXPERT = "model.layers.1.mlp.experts.0.gate_proj"


def scheme_in(name: str, module: str = EXPERT) -> WeightScheme:
    quant = read_quantization(_Reader({}, "", frozenset()), FORMATS[name].config)
    assert quant is not None
    return quant.of(module)


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


def in_file(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    path = folder / "model.safetensors"
    save_file({f"m.{name}": tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def read(path: Path, scheme: WeightScheme, window: Window, shape: tuple[int, int]) -> Weight:
    """What a rank holds whose window is so large."""
    form = format_of(scheme)
    edges = (window.row,)
    weight = form.empty(BUILD, *shape, edges)
    places = TargetsByName(form.targets(Matrix("m", weight, window)))
    places.read([path], THREADS)
    return weight


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_is_what_the_file_means(tmp_path: Path, name: str) -> None:
    found = stored(FORMATS[name], EXPERT + ".weight", matrix(256, 384))
    assert found is not None
    path = in_file(tmp_path, found.tensors)
    scheme = scheme_in(name)
    weight = read(path, scheme, Window((256, 384)), (256, 384))
    assert (dequantize(weight, torch.float32) - found.means).abs().max() < 1e-6
    assert weight.columns == 384


# rows and columns of the window
CUTS = [(slice(128, 256), slice(0, 384)), (slice(0, 256), slice(128, 384))]
ODD_ROWS = (slice(104, 200), slice(0, 384))


@pytest.mark.parametrize("name", FORMATS)
def test_a_shard_is_a_window(tmp_path: Path, name: str) -> None:
    """Rows from inside a block of scales too."""
    found = stored(FORMATS[name], EXPERT + ".weight", matrix(256, 384))
    assert found is not None
    path = in_file(tmp_path, found.tensors)
    scheme = scheme_in(name)
    whole = dequantize(read(path, scheme, Window((256, 384)), (256, 384)), torch.float32)
    for rows, columns in [*CUTS, ODD_ROWS]:
        place = Window((256, 384), rows.start, columns.start)
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        if scheme.ordered and shape[1] < 384:
            with pytest.raises(ConfigError, match=r"m\.weight: desc_act .* tp"):
                read(path, scheme, place, shape)
            continue
        part = read(path, scheme, place, shape)
        assert torch.equal(dequantize(part, torch.float32), whole[rows, columns]), (rows, columns)


@pytest.mark.parametrize("name", FORMATS)
def test_another_ranks_matrix_is_known_by_name_and_shape(name: str) -> None:
    found = stored(FORMATS[name], EXPERT + ".weight", matrix(256, 384))
    assert found is not None
    targets = list(format_of(scheme_in(name)).absent("m", BUILD, (256, 384)))
    assert all(target.view.numel() == 0 for target in targets)
    shapes = {target.name: target.shape for target in targets}
    held = {f"m.{key}": tuple(tensor.shape) or (1,) for key, tensor in found.tensors.items()}
    optional = {target.name for target in targets if target.optional}
    assert held.items() <= shapes.items()
    assert shapes.keys() - held.keys() <= optional


@pytest.mark.parametrize("name", ["w4a16-g128", "w4a16-g32-asym", "w4afp8", "int8-block", "gptq"])
def test_a_cut_inside_a_group_is_refused(name: str) -> None:
    scheme = scheme_in(name)
    form = format_of(scheme)
    weight = form.empty(BUILD, 256, 24)
    with pytest.raises(ConfigError, match=r"m\.weight: a cut at columns 8 to 32 of 384"):
        list(form.targets(Matrix("m", weight, Window((256, 384), 0, 8))))


@pytest.mark.parametrize("name", ["w4a16-g32-asym", "awq", "gptq"])
def test_a_cut_inside_a_word_is_refused(name: str) -> None:
    form = format_of(scheme_in(name))
    weight = form.empty(BUILD, 28, 384)
    with pytest.raises(ConfigError, match=r"m\.weight: a cut at rows 4 to 32 of 256"):
        list(form.targets(Matrix("m", weight, Window((256, 384), 4, 0))))


class _Drawn:
    """What a draw of random weights asks of a model."""

    dtype = torch.float32
    ops = Ops()


def drawn(scheme: WeightScheme, window: Window, shape: tuple[int, int]) -> Weight:
    form = format_of(scheme)
    weight = form.empty(BUILD, *shape, (window.row,))
    for target in form.targets(Matrix("m", weight, window, 0.1)):
        if target.view.numel():
            _draw(target, cast(Transformer, _Drawn()), 5)
    return weight


WHILE_READING = {
    name: quant.scheme
    for name, quant in QUANTIZATIONS.items()
    if quant.scheme and quant.scheme.rounds_while_reading
}


@pytest.mark.parametrize("name", [*FORMATS, *WHILE_READING])
def test_random_weights_are_windows_of_the_whole_draw(name: str) -> None:
    scheme = WHILE_READING[name] if name in WHILE_READING else scheme_in(name)
    whole = dequantize(drawn(scheme, Window((256, 384)), (256, 384)), torch.float32)
    assert whole.std() == pytest.approx(0.1, rel=0.1)
    for rows, columns in [*CUTS, ODD_ROWS]:
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        if scheme.ordered and shape[1] < 384:
            continue
        part = drawn(scheme, Window((256, 384), rows.start, columns.start), shape)
        assert torch.equal(dequantize(part, torch.float32), whole[rows, columns]), (rows, columns)


# ---- what cannot be right


def refusal(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> str:
    path = in_file(folder, tensors)
    with pytest.raises(LoadError) as caught:
        read(path, scheme_in(name), Window((256, 384)), (256, 384))
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("m.")
    return text


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_that_is_no_number_is_named(tmp_path: Path, name: str, number: float) -> None:
    found = stored(FORMATS[name], EXPERT + ".weight", matrix(256, 384))
    assert found is not None
    tensors = dict(found.tensors)
    (key,) = [name for name in tensors if "scale" in name]
    if tensors[key].dtype == torch.float8_e8m0fnu:
        number = float("nan")  # it has no infinity
    broken = tensors[key].float()
    broken.view(-1)[-1] = number
    tensors[key] = broken.to(tensors[key].dtype)
    assert f"m.{key} in model.safetensors holds a scale that is no number" in refusal(
        tmp_path, name, tensors
    )


def test_numbers_that_contradict_the_configuration_are_named(tmp_path: Path) -> None:
    def tensors(name: str) -> dict[str, Tensor]:
        found = stored(FORMATS[name], EXPERT + ".weight", matrix(256, 384))
        assert found is not None
        return dict(found.tensors)

    given = tensors("gptq")
    given["qzeros"] = given["qzeros"] + 1
    assert "m.qzeros in model.safetensors holds zero points" in refusal(tmp_path, "gptq", given)
    given = tensors("gptq")
    given["g_idx"] = given["g_idx"].flip(0)
    assert "is out of order, though desc_act is false" in refusal(tmp_path, "gptq", given)
    given = tensors("gptq-desc-act")
    given["g_idx"] = given["g_idx"] + 1
    assert "names a group outside 0 to 11" in refusal(tmp_path, "gptq-desc-act", given)
    given = tensors("w4aint8")
    given["weight"] = given["weight"] * 2
    assert "outside -8 to 7" in refusal(tmp_path, "w4aint8", given)
    given = tensors("w4a16-g128")
    given["weight_packed"] = given["weight_packed"].float()
    assert "is torch.float32, the configuration asks for torch.int32" in refusal(
        tmp_path, "w4a16-g128", given
    )
    given = tensors("w4a16-g64")
    assert "m.weight_scale in model.safetensors has shape [256, 6]" in refusal(
        tmp_path, "w4a16-g128", given
    )


def test_groups_in_another_order_are_one_order_for_a_merged_matrix(tmp_path: Path) -> None:
    """Matrices that are one here share their input, and so one order of its columns."""
    form = format_of(scheme_in("gptq-desc-act"))
    weight = form.empty(BUILD, 512, 384)
    places = TargetsByName(
        target
        for index, name in enumerate("ab")
        for target in form.targets(
            Matrix(name, weight.part(256 * index, 256 * index + 256), Window((256, 384)))
        )
    )
    found = stored(FORMATS["gptq-desc-act"], EXPERT + ".weight", matrix(256, 384))
    assert found is not None
    path = tmp_path / "model.safetensors"
    other = {**found.tensors, "g_idx": found.tensors["g_idx"].flip(0)}
    both = {f"a.{k}": t for k, t in found.tensors.items()} | {f"b.{k}": t for k, t in other.items()}
    save_file({name: t.contiguous().clone() for name, t in both.items()}, path)

    def load_all() -> None:
        places.read([path], THREADS)

    said = r"[ab]\.g_idx in .* differs from that of a matrix beside it"  # the one that is read last
    with pytest.raises(LoadError, match=said):
        load_all()


# ---- checkpoints


def tokens() -> Tensor:
    return torch.randint(0, 128, (2, LENGTH), generator=torch.Generator().manual_seed(7))


def check(folder: Path, name: str, family: str, patch: pytest.MonkeyPatch, ops: Ops) -> None:
    model = save_quantized(folder, name, family)
    with torch.no_grad():
        want = model(tokens()).logits
    loaded = load(folder, ops)
    rounded = all_logits(loaded, tokens(), [LENGTH - 3])
    cosine = torch.cosine_similarity(rounded, want, dim=-1)
    assert cosine.median() > 0.99
    assert cosine.quantile(0.1) > 0.9, cosine
    with patch.context() as patched:
        wide_rows(patched)  # what kernels know of a weight is kept: these are other ones
        exact = all_logits(load(folder, ops), tokens(), [LENGTH - 3])
    if isinstance(ops, CpuOps) and ops.native:
        # a step of a rounded row may fall to the other side
        same = all_logits(load(folder, Ops()), tokens(), [LENGTH - 3])
        likeness = torch.cosine_similarity(rounded, same, dim=-1)
        assert likeness.median() > 0.9999, likeness
    assert (exact - want).abs().max() < BOUND, (exact - want).abs().max()


CHEAP = ["fp8-channel", "int8-channel", "w4a16-g32", "gptq-desc-act", "awq", "int4-experts"]
WIDENED = ["fp8-channel", "gptq-desc-act"]  # of those: what no compiled kernel takes


@pytest.mark.parametrize("name", CHEAP)
def test_logits_equal_transformers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = CpuOps()
    check(tmp_path, name, "v3", monkeypatch, ops)
    if ops.native:
        own = {reason for reason in ops.told if not reason.endswith(" wide")}  # wide_rows' refusal
        assert bool(own) == (name in WIDENED), own


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["v3", "qwen", "v2"])
@pytest.mark.parametrize("ops", [Ops(), CpuOps(native=False), CpuOps()], ids=["ref", "torch", "c"])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_transformers_everywhere(
    tmp_path: Path, name: str, family: str, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, name, family, monkeypatch, ops)


def test_formats_merged_into_one_matrix_are_one(tmp_path: Path) -> None:
    """Named before any file is read."""
    config = {**FORMATS["w4a16-g32"].config, "ignore": ["model.layers.1.self_attn.k_proj"]}
    quant = read_quantization(_Reader({}, "", frozenset()), config)
    build = replace(BUILD, quant=quant)
    names = [f"model.layers.1.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")]
    with pytest.raises(ConfigError) as caught:
        build.scheme(names, 128)
    assert str(caught.value) == (
        "model.layers.1.self_attn.q_proj.weight is int4 in groups of 32, "
        "model.layers.1.self_attn.k_proj.weight is wide: they are one matrix here and cannot be of "
        "two formats"
    )
    assert build.scheme(["model.layers.1.self_attn.k_proj"], 128) == WIDE

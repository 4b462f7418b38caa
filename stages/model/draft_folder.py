"""The folder of a draft that was distilled from its target: some layers, and a head over some of the ids.

    config.json         the target's shape with num_hidden_layers = L, and the object `draft`, a `DraftCard`
    model.safetensors   layers, `model.norm.weight`, `lm_head.weight` [R, hidden], and `head_token_ids`
                        int32 [R], ascending: the target's id of each row of the head

The input embedding is the target's and is read from the target's folder. A matrix may be stored as int8
beside a float32 `NAME.scale` per row; it is turned into the dtype of the run when it is loaded. There is no
tokenizer: the folder names its target by the SHA-256 of the target's tokenizer.json. Knows nothing about
how the draft was trained, nor how its proposals are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kernels.quantise import quantise_rows
from pipeline.errors import ConfigError
from stages.model.draft_card import FORMAT_VERSION, DraftCard, read_card
from stages.model.shape import ModelShape, read_shape
from stages.model.weights import LoadedModel, assemble_weights, expected_tensors, read_tensors

_IDS_NAME = "head_token_ids"
_EMBED_NAME = "model.embed_tokens.weight"
_SCALE_SUFFIX = ".scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A draft ready for `ModelRunner`, and what its head's rows mean."""

    model: LoadedModel
    """`weights.head` is [R, hidden]; `shape.vocab_size` is the target's, as the embedding has it."""
    head_token_ids: Tensor
    """int64 [R], ascending."""


def tokenizer_fingerprint(target_folder: Path) -> str:
    """SHA-256 of the target's tokenizer.json. Raises `ConfigError` if there is none."""
    path = target_folder / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; a distilled draft is tied to its target's tokenizer.json"
        ) from None


def load_draft_folder(folder: Path, target_folder: Path, *, dtype: torch.dtype) -> LoadedDraft:
    """Load a draft and check that it belongs to the target.

    Raises `ConfigError` where sizes, tokenizer or content do not fit.
    """
    card = read_card(folder)
    shape = read_shape(folder)
    _check_fit(folder, shape, card, target_folder)
    expected = _stored_tensors(shape, card)
    stored = _read_all(folder / "model.safetensors")
    _check_content(folder, stored, expected)
    head_token_ids = stored.pop(_IDS_NAME).to(torch.int64)
    _check_ids(folder, head_token_ids, shape.vocab_size)
    tensors = {name: _restore(stored, name, dtype) for name in expected if name != _IDS_NAME}
    tensors[_EMBED_NAME] = read_tensors(target_folder, [_EMBED_NAME], dtype=dtype)[_EMBED_NAME]
    model = LoadedModel(
        shape=shape,
        weights=assemble_weights(shape, lambda name: tensors.pop(name)),
        eos_token_ids=shape.eos_token_ids,
    )
    return LoadedDraft(model=model, head_token_ids=head_token_ids)


def save_draft_folder(
    folder: Path,
    *,
    target_folder: Path,
    tensors: Mapping[str, Tensor],
    head_token_ids: Tensor,
    dtype: torch.dtype,
) -> None:
    """Write config.json and model.safetensors into an existing folder.

    tensors: by checkpoint name, one for each layer, `model.norm.weight` and `lm_head.weight` [R, hidden].
    head_token_ids: [R], ascending. dtype: how matrices are stored; int8 means rounded, with a scale a row.
    Vectors are stored as float32 then, else in `dtype` too.
    """
    num_layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    config = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    for key in ("layer_types", "max_window_layers", "_name_or_path"):
        config.pop(key, None)
    config |= {"num_hidden_layers": num_layers, "tie_word_embeddings": False}
    config["draft"] = {
        "version": FORMAT_VERSION,
        "embedding": "target",
        "head_vocabulary": len(head_token_ids),
        "tokenizer_sha256": tokenizer_fingerprint(target_folder),
    }
    stored: dict[str, Tensor] = {_IDS_NAME: head_token_ids.to(torch.int32).contiguous()}
    for name, tensor in tensors.items():
        if dtype != torch.int8:
            stored[name] = tensor.detach().to("cpu", dtype).contiguous()
        elif tensor.dim() == 2:
            stored[name], stored[name + _SCALE_SUFFIX] = quantise_rows(tensor.detach().cpu())
        else:
            stored[name] = tensor.detach().to("cpu", torch.float32).contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_fit(folder: Path, shape: ModelShape, card: DraftCard, target_folder: Path) -> None:
    target = read_shape(target_folder)
    advice = "choose the draft that was distilled from this target, or draft.kind=layers or ngram"
    for what, ours, theirs in (
        ("vocabulary", shape.vocab_size, target.vocab_size),
        ("hidden size", shape.hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise ConfigError(
                f"the draft {folder} does not fit the target {target_folder}: its {what} is {ours}, expected "
                f"{theirs}; {advice}"
            )
    fingerprint = tokenizer_fingerprint(target_folder)
    if fingerprint != card.tokenizer_sha256:
        raise ConfigError(
            f"the draft {folder} was distilled with another tokenizer: sha256 "
            f"{card.tokenizer_sha256[:16]}..., the target's tokenizer.json has {fingerprint[:16]}...; "
            f"{advice}"
        )


def _stored_tensors(shape: ModelShape, card: DraftCard) -> dict[str, tuple[int, ...]]:
    sizes = expected_tensors(replace(shape, tie_embeddings=False))
    del sizes[_EMBED_NAME]
    sizes["lm_head.weight"] = (card.head_vocabulary, shape.hidden_size)
    sizes[_IDS_NAME] = (card.head_vocabulary,)
    return sizes


def _read_all(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}; copy the draft again") from None


def _check_content(folder: Path, stored: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    for name, size in expected.items():
        tensor = stored.get(name)
        if tensor is None or tuple(tensor.shape) != size:
            found = "nothing" if tensor is None else f"{tuple(tensor.shape)}"
            raise ConfigError(f"{folder}: {name}: expected {size}, found {found}; copy the draft again")
        if tensor.dtype == torch.int8:
            scale = stored.get(name + _SCALE_SUFFIX)
            if scale is None or tuple(scale.shape) != size[:1]:
                raise ConfigError(f"{folder}: {name} is int8 without a scale per row; copy the draft again")
        elif name != _IDS_NAME and not tensor.is_floating_point():
            raise ConfigError(f"{folder}: {name} is {tensor.dtype}, expected a float format or int8")
    scales = {name + _SCALE_SUFFIX for name in expected}
    surplus = sorted(stored.keys() - expected.keys() - scales)
    if surplus:
        raise ConfigError(f"{folder} has unexpected tensors: {', '.join(surplus[:3])}; copy the draft again")


def _check_ids(folder: Path, ids: Tensor, vocab_size: int) -> None:
    is_ascending = bool((ids[1:] > ids[:-1]).all())
    if not is_ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ConfigError(
            f"{folder}: {_IDS_NAME} must be ascending ids below {vocab_size}, got {ids[:3].tolist()}...; "
            "make the draft again"
        )


def _restore(stored: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    tensor = stored[name]
    if tensor.dtype != torch.int8:
        return tensor.to(dtype)
    # The product is formed in float32 at least, and rounded once.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return tensor.to(wide).mul_(stored[name + _SCALE_SUFFIX].to(wide)[:, None]).to(dtype)

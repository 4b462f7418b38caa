"""The vocabulary of a model folder: loading it, and telling whether two models share one.

The text stages turn text into ids and back with it; the speculator asks whether a draft speaks the
target's ids. Only `tokenizer.json` is read, the format of the `tokenizers` library.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from pipeline.errors import ConfigError


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load `tokenizer.json` of a local model folder, without truncation or padding.

    Raises `ConfigError` if there is none or it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: expected a tokenizer.json beside the weights, found none; add it")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path}: expected a tokenizer of the tokenizers library, got: {error}") from None
    # Some folders carry the settings of their training runs; a prompt must never be cut or filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_same_vocabulary(target_folder: Path, draft_folder: Path) -> None:
    """Raise `ConfigError` unless every token that both models name has the same id in both.

    Tokens that only one of them names are harmless, whichever it is: models of one family differ in
    reserved and padded ids at the end. The error shows the first token that differs, lowest id first.
    """
    target_file, draft_file = target_folder / "tokenizer.json", draft_folder / "tokenizer.json"
    if target_file.is_file() and draft_file.is_file() and target_file.read_bytes() == draft_file.read_bytes():
        return
    target_ids = load_tokenizer(target_folder).get_vocab(with_added_tokens=True)
    draft_ids = load_tokenizer(draft_folder).get_vocab(with_added_tokens=True)
    difference = find_difference(target_ids, draft_ids)
    if difference is not None:
        raise ConfigError(
            f"the draft {draft_folder} does not have the target's vocabulary: {difference}; choose a draft "
            "of the target's family, or speculation.draft.kind=layers or ngram"
        )


def find_difference(target_ids: dict[str, int], draft_ids: dict[str, int]) -> str | None:
    """Describe the first conflict between two maps from token to id, or return None if there is none."""
    draft_tokens = {token_id: token for token, token_id in draft_ids.items()}
    for token, token_id in sorted(target_ids.items(), key=lambda entry: entry[1]):
        draft_id = draft_ids.get(token, token_id)
        if draft_id != token_id:
            return f"token {token!r} has id {token_id} in the target and {draft_id} in the draft"
        draft_token = draft_tokens.get(token_id, token)
        if draft_token != token:
            return f"id {token_id} is {token!r} in the target and {draft_token!r} in the draft"
    return None

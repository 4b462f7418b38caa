"""Small tokenizers of the kinds that decoders of the Llama family use, and model folders that hold them."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b\n",
    "  two leading spaces,   three in the middle",
    "Grüße aus Köln! 東京と大阪 🌵🌵 👩‍👩‍👧 café naïve",
    "hello hello world world the the and and in in",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)


def byte_level(*, with_bos: bool = False) -> Tokenizer:
    """As in Llama 3, Qwen and SmolLM2: every token is a string of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", " added word"])
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
        )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As in Llama 2 and Mistral: words with a leading `▁`, and byte tokens for what has no token."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [
        "▁",
        "▁▁",
        "▁the",
        "▁he",
        "llo",
        "▁world",
        "é",
        "京",
        "a",
        "b",
        "c",
        ".",
        "\n",
        "▁\ufffd",
        "\ufffd",
    ]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=[("▁", "▁")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    """As in T5-style vocabularies: a Unigram model whose decoder drops the first leading space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """Words joined by spaces that are in no token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save_model_folder(folder: Path, tokenizer: Tokenizer, **settings: object) -> Path:
    """Write `tokenizer.json`, `tokenizer_config.json` with `settings`, and an empty `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder

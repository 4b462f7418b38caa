"""`SamplingParams`: the options of one prompt for `pipeline.LLM`, with the names and defaults of vLLM."""

from __future__ import annotations

from typing import Any

from conf.limits import MAX_WHOLE_NUMBER
from pipeline.errors import RequestError
from pipeline.messages import Sampling
from pipeline.sampling_options import check_option_names, resolve_options

_INSTEAD = {
    "best_of": "ask for several answers and choose one",
    "use_beam_search": "there is no beam search; temperature=0 is greedy",
    "max_new_tokens": "the name is max_tokens",
    "do_sample": "temperature=0 is greedy, more than 0 samples",
}
"""What to do where a name is another engine's."""


class SamplingParams:
    """How an answer is sampled. Every field of `pipeline.messages.Sampling` is an option.

    The defaults are vLLM's: temperature 1, 16 tokens. options: what was given and defaulted, by name.
    """

    def __init__(
        self,
        *,
        max_tokens: int | None = 16,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        **others: object,
    ) -> None:
        """max_tokens: None: as many as the context holds. top_k: 0 or -1 keeps every token.

        seed: None: a fresh one. others: the further fields of `Sampling`.
        Raises `RequestError` that names the option that is not supported, or out of range.
        """
        for name in others:
            if name in _INSTEAD and name not in Sampling.__struct_fields__:
                raise RequestError(f"SamplingParams({name}=...) is not supported: {_INSTEAD[name]}")
        check_option_names(others)
        self.options: dict[str, object] = {
            "max_tokens": MAX_WHOLE_NUMBER if max_tokens is None else max_tokens,
            "temperature": temperature,
            "top_k": 0 if top_k == -1 else top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            **others,
        }
        resolve_options(self.options, {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["options"][name]
        except KeyError:
            raise AttributeError(f"SamplingParams has no option {name!r}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and other.options == self.options

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

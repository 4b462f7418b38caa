"""`SamplingParams`: the options of one prompt for `pipeline.LLM`, with the names and defaults of vLLM."""

from __future__ import annotations

from typing import Any

from conf.limits import MAX_WHOLE_NUMBER
from pipeline.client_options import without_defaults
from pipeline.errors import RequestError, shown
from pipeline.messages import Sampling
from pipeline.sampling_options import with_options

_INSTEAD = {
    "best_of": "ask for several answers and choose one",
    "use_beam_search": "there is no beam search; temperature=0 is greedy",
    "max_new_tokens": "the name is max_tokens",
    "do_sample": "temperature=0 is greedy, more than 0 samples",
    "guided_decoding": "the name is structured_outputs",
    "guided_json": "the name is structured_outputs={'json': ...}",
}
"""What to do where a name is another engine's."""


class SamplingParams:
    """How an answer is sampled. Every field of `pipeline.messages.Sampling` is an option.

    The defaults are vLLM's: temperature 1, 16 tokens. options: what was given and defaulted, by name, but for
    `n`, which is no option of a single answer.
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
        n: int = 1,
        **others: object,
    ) -> None:
        """max_tokens: None: as many as the context holds. top_k: 0 or -1 keeps every token.

        seed: None: a fresh one. n: answers to each prompt, each with a seed of its own; the first has `seed`
        itself. others: the further fields of `Sampling`.
        Raises `RequestError` that names the option that is not supported, or out of range.
        """
        for name in others:
            if name in _INSTEAD and name not in Sampling.__struct_fields__:
                raise RequestError(f"SamplingParams({name}=...) is not supported: {_INSTEAD[name]}")
        if not isinstance(n, int) or n < 1:
            raise RequestError(f"n={shown(n)}: expected a whole number of at least 1")
        self.n = n
        self.options: dict[str, object] = {
            "max_tokens": MAX_WHOLE_NUMBER if max_tokens is None else max_tokens,
            "temperature": temperature,
            "top_k": 0 if top_k == -1 else top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            **others,
        }
        with_options(Sampling(max_tokens=1, seed=0), without_defaults(self.options))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["options"][name]
        except KeyError:
            raise AttributeError(f"SamplingParams has no option {name!r}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and (other.n, other.options) == (self.n, self.options)

    def __repr__(self) -> str:
        options = {"n": self.n, **self.options}
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in options.items())})"

"""`SamplingParams`: the options of one prompt for `pipeline.LLM`, with the names and defaults of vLLM."""

from __future__ import annotations

from typing import Any, Self

from conf.limits import MAX_SAMPLES, MAX_WHOLE_NUMBER
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
    `n`, which is no option of a single answer. All may be set later, as in `params.max_tokens = 64`, and are
    checked then as well.
    """

    def __init__(
        self,
        *,
        max_tokens: int | None = 16,
        temperature: float | None = 1.0,
        top_k: int | None = 0,
        top_p: float | None = 1.0,
        min_p: float | None = 0.0,
        seed: int | None = None,
        n: int = 1,
        **others: object,
    ) -> None:
        """max_tokens: None: as many as the context holds. top_k: 0 or -1 keeps every token.

        temperature, top_k, top_p, min_p: None is the default. seed: None: a fresh one. n: answers to each
        prompt, each with a seed of its own; the first has `seed` itself. others: the further fields of
        `Sampling`.
        Raises `RequestError` that names the option that is not supported, or out of range.
        """
        for name in others:
            if name in _INSTEAD and name not in Sampling.__struct_fields__:
                raise RequestError(f"SamplingParams({name}=...) is not supported: {_INSTEAD[name]}")
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_SAMPLES:
            raise RequestError(f"n={shown(n)}: expected a whole number of at least 1, at most {MAX_SAMPLES}")
        self.n: int
        self.options: dict[str, object]
        options = {
            "max_tokens": MAX_WHOLE_NUMBER if max_tokens is None else max_tokens,
            "temperature": 1.0 if temperature is None else temperature,
            "top_k": 0 if top_k in (None, -1) else top_k,
            "top_p": 1.0 if top_p is None else top_p,
            "min_p": 0.0 if min_p is None else min_p,
            "seed": seed,
            **others,
        }
        with_options(Sampling(max_tokens=1, seed=0), without_defaults(options))
        self.__dict__.update(n=n, options=options)

    def clone(self) -> Self:
        """Parameters like these, to be set otherwise."""
        return type(self)(n=self.n, **self.options)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: object) -> None:
        """Set an option. Raises `RequestError` as the constructor does, and changes nothing then."""
        changed = type(self)(**{"n": self.n, **self.options, name: value})  # type: ignore[arg-type]
        self.__dict__.update(changed.__dict__)

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

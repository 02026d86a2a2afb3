# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine has computed of a prompt, by chunks and by layers."""

from dataclasses import dataclass

from .actions import Offer


@dataclass
class Computed:
    """All offers since the prefill request has last begun.

    Attributes:
        offer: the block table so far.
        tokens: per part of the layers, tokens from the start of the prompt.
    """

    offer: Offer
    tokens: list[int]

    @classmethod
    def of(cls, first: Offer) -> "Computed":
        """Begin with the first offer of a generation."""
        tokens = [0] * first.parts
        tokens[first.part] = first.computed_tokens
        return cls(first, tokens)

    def add(self, offer: Offer) -> None:
        """Take the next offer of the generation."""
        if offer.part == 0:
            self.offer = self.offer.joined(offer)
        self.tokens[offer.part] = offer.computed_tokens

    @property
    def complete(self) -> bool:
        """Whether all layers of the whole prompt are there."""
        return min(self.tokens) == self.offer.prompt_tokens

# SPDX-License-Identifier: Apache-2.0
"""The bodies of the two legs, made from the client's body."""

from collections.abc import Mapping
from typing import Any

from .config import SideChannel

Body = dict[str, Any]

KV_PARAMS = "kv_transfer_params"
CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

# Fields that shape an answer which nobody reads, or that a single token cannot
# satisfy. None of them takes part in building the prompt.
_NOT_FOR_PREFILL = frozenset(
    {
        "best_of",
        "echo",
        "logprob_token_ids",
        "logprobs",
        "min_tokens",
        "prompt_logprobs",
        "return_prompt_text",
        "return_token_ids",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "top_logprobs",
    }
)


def prefill_body(body: Mapping[str, Any], *, keep_tool_choice: bool = False) -> Body:
    """The client's request cut down to computing the prompt's KV cache.

    The prompt must come out token for token as on the decode side, so everything
    that a chat template may see stays: ``tools``, ``response_format`` and so on.
    """
    leg = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
    leg["stream"] = False
    leg["max_tokens"] = 1
    if leg.get("max_completion_tokens") is not None:
        leg["max_completion_tokens"] = 1
    if "n" in leg:
        leg["n"] = 1
    # The one token may be an end token; the leg must finish by length all the
    # same, since an engine hands over only what finished normally.
    leg["ignore_eos"] = True
    # A forced call cannot be completed in one token and fails in the engine's
    # parser. ``null`` keeps the tools in the prompt, which "none" may not.
    choice = leg.get("tool_choice")
    if not keep_tool_choice and (choice == "required" or isinstance(choice, dict)):
        leg["tool_choice"] = None
    return leg


def with_params(body: Mapping[str, Any], params: Mapping[str, Any]) -> Body:
    """``body`` with the hand-off's parameters and nothing else changed."""
    return {**body, KV_PARAMS: dict(params)}


def receivers(body: Mapping[str, Any]) -> int:
    """How many sequences on the decode side will read the prompt's KV cache."""
    n = body.get("n")
    return n if isinstance(n, int) and n >= 1 else 1


def prefill_params(transfer_id: str, body: Mapping[str, Any]) -> Body:
    """What makes an engine keep or push the prompt's KV cache."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "num_receivers": receivers(body),
    }


def push_decode_params(transfer_id: str, channel: SideChannel) -> Body:
    """What makes an engine register with the prefill engine behind ``channel``."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": channel.engine_id,
        "remote_host": channel.host,
        "remote_port": channel.port,
        "tp_size": channel.tp_size,
        "pp_size": channel.pp_size,
    }


def pull_decode_params(
    transfer_id: str, body: Mapping[str, Any], answered: Mapping[str, Any]
) -> Body:
    """The prefill engine's coordinates, named for this hand-off."""
    return {
        **answered,
        "transfer_id": transfer_id,
        "num_receivers": receivers(body),
    }


def needs_local_prefill(path: str, body: Mapping[str, Any]) -> bool:
    """Whether the decode engine must compute the prompt itself.

    Logprobs of the prompt come only from a forward pass over it; beam search
    drops the hand-off's parameters; several prompt embeddings would share one
    set of them.
    """
    if body.get("use_beam_search") or body.get("prompt_logprobs") is not None:
        return True
    if path == CHAT_PATH:
        # Echoing a chat asks the engine for prompt logprobs as well.
        return bool(body.get("echo"))
    if body.get("echo") and body.get("logprobs") is not None:
        return True
    embeds = body.get("prompt_embeds")
    has_text = body.get("prompt") not in (None, "")
    if isinstance(embeds, list):
        return len(embeds) > 1 or (len(embeds) == 1 and has_text)
    return embeds is not None and has_text

# SPDX-License-Identifier: Apache-2.0
"""Routers each of which breaks the contract in one way, and what finds it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from router_contract.small_router import PARAMS, Body, LegError, SmallRouter, digest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode


@dataclass(frozen=True)
class Defect:
    """A router and the checks that must fail for it, in the modes that have it."""

    router: type[SmallRouter]
    found_by: tuple[str, ...]
    modes: tuple[Mode, ...] = tuple(Mode)


class NamesByClientId(SmallRouter):
    """The client's own id names the hand-off, each time it comes."""

    def new_name(self, headers: Mapping[str, str]) -> str:
        return headers.get("X-Request-Id") or super().new_name(headers)


class NamesByPrompt(SmallRouter):
    """Equal requests get equal names."""

    async def serve(
        self, request: web.Request, body: Body, conversation: str
    ) -> web.StreamResponse:
        router = SmallRouter(
            self.mode,
            self.prefill,
            self.decode,
            (self.prefill_channel, self.decode_channel),
        )
        router.session = self.session
        name = digest(body.get("prompt"))
        setattr(router, "new_name", lambda _: name)  # noqa: B010
        return await router.serve(request, body, conversation)


class LegsOfTwoNames(SmallRouter):
    def prefill_name(self, name: str) -> str:
        return f"{name}-p"


class StreamedPrefill(SmallRouter):
    """The cap is right, and what it costs is not."""

    def prefill_body(self, body: Body) -> Body:
        leg = super().prefill_body(body)
        return {**leg, "stream": body.get("stream", False)}


class UncappedPrefill(SmallRouter):
    def prefill_body(self, body: Body) -> Body:
        return {**super().prefill_body(body), "max_tokens": body.get("max_tokens", 16)}


class UncappedChatPrefill(SmallRouter):
    """``max_completion_tokens`` goes before ``max_tokens``."""

    def prefill_body(self, body: Body) -> Body:
        leg = super().prefill_body(body)
        if "max_completion_tokens" in body:
            leg["max_completion_tokens"] = body["max_completion_tokens"]
        return leg


class KeepsMinTokens(SmallRouter):
    def prefill_body(self, body: Body) -> Body:
        leg = super().prefill_body(body)
        return {**leg, **{k: body[k] for k in ("min_tokens",) if k in body}}


class KeepsStreamOptions(SmallRouter):
    def prefill_body(self, body: Body) -> Body:
        leg = super().prefill_body(body)
        return {**leg, **{k: body[k] for k in ("stream_options",) if k in body}}


class OneAfterTheOther(SmallRouter):
    """Push without what push is for."""

    async def together(
        self, prefill: Awaitable[Body], decode: Awaitable[web.StreamResponse]
    ) -> web.StreamResponse:
        try:
            await prefill
        except BaseException:
            asyncio.ensure_future(decode).cancel()
            raise
        return await decode


class BothAtOnce(SmallRouter):
    """Pull that asks D before there is anything to read."""

    async def serve(
        self, request: web.Request, body: Body, conversation: str
    ) -> web.StreamResponse:
        early = asyncio.ensure_future(
            self.relay(request, request.path, body, {}, {"X-Request-Id": "early"})
        )
        try:
            return await super().serve(request, body, conversation)
        finally:
            early.cancel()
            await asyncio.gather(early, return_exceptions=True)


class WrongAddress(SmallRouter):
    """D is told its own side channel."""

    def push_params(self, name: str) -> Body:
        return {**super().push_params(name), "remote_port": self.decode_channel[1]}

    def pull_params(self, name: str, answered: Body) -> Body:
        params = super().pull_params(name, answered)
        return {**params, "remote_port": self.decode_channel[1]}


class KnownFieldsOnly(SmallRouter):
    """What it does not know of P's answer is lost."""

    def pull_params(self, name: str, answered: Body) -> Body:
        known = ("do_remote_prefill", "remote_host", "remote_port", "remote_request_id")
        return {**{key: answered[key] for key in known}, "transfer_id": name}


class CoarseNumbers(SmallRouter):
    """Numbers of P's answer go through a type that has fewer of them."""

    def pull_params(self, name: str, answered: Body) -> Body:
        params = super().pull_params(name, answered)
        return {**params, "remote_generation": params["remote_generation"] + "0"}


class SilentAboutReceivers(SmallRouter):
    def prefill_params(self, name: str, body: Body, conversation: str) -> Body:
        params = super().prefill_params(name, body, conversation)
        return {key: value for key, value in params.items() if key != "num_receivers"}


class ManyPrefills(SmallRouter):
    """``n`` prompts are computed for ``n`` answers."""

    def prefill_body(self, body: Body) -> Body:
        return {**super().prefill_body(body), "n": body.get("n", 1)}


class DropsUnknownFields(SmallRouter):
    def cleaned(self, body: Body) -> Body:
        clean = super().cleaned(body)
        return {key: value for key, value in clean.items() if key != "x_unknown"}


class CapsDecode(SmallRouter):
    """What was changed for P stays changed for D."""

    def decode_body(self, body: Body) -> Body:
        return {**body, "max_tokens": 1} if body.get("max_tokens") == 50 else body


class DropsStop(SmallRouter):
    def decode_body(self, body: Body) -> Body:
        return {key: value for key, value in body.items() if key != "stop"}


class DropsLogprobs(SmallRouter):
    def decode_body(self, body: Body) -> Body:
        return {key: value for key, value in body.items() if key != "logprobs"}


class AddsToDecode(SmallRouter):
    def decode_body(self, body: Body) -> Body:
        return {**body, "ignore_eos": True}


class HidesTemplateFromPrefill(SmallRouter):
    """P's prompt then has other tokens."""

    def prefill_body(self, body: Body) -> Body:
        leg = super().prefill_body(body)
        leg.pop("chat_template_kwargs", None)
        return leg


class MergesClientParams(SmallRouter):
    """The client's parameters are the base of the router's own."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body: Body = json.loads(await request.read())
        self.given = body.get(PARAMS) or {}
        return await super().handle(request)

    def prefill_params(self, name: str, body: Body, conversation: str) -> Body:
        return {**self.given, **super().prefill_params(name, body, conversation)}


class ShowsParams(SmallRouter):
    def kept(self, body: Body) -> Body:
        return body


class WholeLists(SmallRouter):
    """A list of prompts is one hand-off."""

    def parts(self, body: Body) -> list[Body]:
        return [body]


class ListsBackwards(SmallRouter):
    def merged(self, answers: list[web.StreamResponse]) -> web.Response:
        return super().merged(answers[::-1])


class NoHandoffForChats(SmallRouter):
    """D computes the prompt of a chat; nobody notices but the one who pays."""

    async def serve(
        self, request: web.Request, body: Body, conversation: str
    ) -> web.StreamResponse:
        if "messages" not in body:
            return await super().serve(request, body, conversation)
        return await self.relay(request, request.path, body, {}, {})


class HoldsStreams(SmallRouter):
    """A stream is passed on when it is whole."""

    async def first_event(self, response: aiohttp.ClientResponse) -> bytes:
        data = await super().first_event(response)
        async for more in response.content.iter_any():
            data += more
        return data


class DropsWords(SmallRouter):
    """One word in a stream gets lost."""

    async def write(self, stream: web.StreamResponse, data: bytes) -> None:
        events = data.split(b"\n\n")
        if len(events) > 2:
            del events[1]
        await stream.write(b"\n\n".join(events))


class SharesState(SmallRouter):
    """The latest request's body is everybody's."""

    async def serve(
        self, request: web.Request, body: Body, conversation: str
    ) -> web.StreamResponse:
        self.latest = body
        await asyncio.sleep(0.01)
        return await super().serve(request, self.latest, conversation)


class LegsOutliveClients(SmallRouter):
    async def handle(self, request: web.Request) -> web.StreamResponse:
        return await asyncio.shield(asyncio.ensure_future(super().handle(request)))


class DecodeAlone(SmallRouter):
    """A failed prefill leg is D's to make good."""

    async def post_prefill(self, path: str, body: Body, headers: Body) -> Body:
        try:
            return await super().post_prefill(path, body, headers)
        except LegError:
            return {PARAMS: {}}

    def push_params(self, name: str) -> Body:
        return {}

    def pull_params(self, name: str, answered: Body) -> Body:
        return {} if not answered else super().pull_params(name, answered)


class LonelyDecode(SmallRouter):
    """P has failed; D goes on waiting for it."""

    async def together(
        self, prefill: Awaitable[Body], decode: Awaitable[web.StreamResponse]
    ) -> web.StreamResponse:
        waiting = asyncio.ensure_future(decode)
        waiting.add_done_callback(lambda leg: leg.cancelled() or leg.exception())
        await prefill
        return await waiting


class LonelyPrefill(SmallRouter):
    """D has failed; P goes on computing for it."""

    async def together(
        self, prefill: Awaitable[Body], decode: Awaitable[web.StreamResponse]
    ) -> web.StreamResponse:
        computing = asyncio.ensure_future(prefill)
        computing.add_done_callback(lambda leg: leg.cancelled() or leg.exception())
        answer = await decode
        await computing
        return answer


class PlainFailures(SmallRouter):
    """Nothing says that the request may be sent again."""

    def failure(self) -> web.Response:
        return web.Response(status=500, text="Internal Server Error")


class FailuresWithStatusOk(SmallRouter):
    def failure(self) -> web.Response:
        return web.json_response({"error": {"message": "failed"}}, status=200)


class RefusalsAreFailures(SmallRouter):
    """A client that sends it again gets the same again."""

    def refusal(self, status: int, body: bytes) -> web.Response:
        return self.failure()


class StreamsBeforeTheyBegin(SmallRouter):
    """The client has its 200 before there is an answer."""

    async def first_event(self, response: aiohttp.ClientResponse) -> bytes:
        return await response.content.readany() or b"data: {}\n\n"


class EndsBrokenStreams(SmallRouter):
    """Every stream gets its proper end."""

    def broken(self, request: web.Request) -> None:
        pass

    async def end(self, stream: web.StreamResponse) -> None:
        await stream.write(b"data: [DONE]\n\n")
        await super().end(stream)


class RetriesByTheSameName(SmallRouter):
    async def post_prefill(self, path: str, body: Body, headers: Body) -> Body:
        try:
            return await super().post_prefill(path, body, headers)
        except LegError:
            await asyncio.sleep(0.2)
            return await super().post_prefill(path, body, headers)


class ForgetsTurns(SmallRouter):
    def turn_ended(self, conversation: str, name: str) -> None:
        pass


class ForgetsStreamedTurns(SmallRouter):
    """Only whole answers carry the engine's words."""

    async def serve(
        self, request: web.Request, body: Body, conversation: str
    ) -> web.StreamResponse:
        kept = "" if body.get("stream") else conversation
        return await super().serve(request, body, kept)


class OneCaller(SmallRouter):
    """Whoever names a conversation has it."""

    def conversation(self, body: Body, headers: Mapping[str, str]) -> str:
        return str(body.get("conversation_id") or "")


class OneConversation(SmallRouter):
    def conversation(self, body: Body, headers: Mapping[str, str]) -> str:
        return str(headers.get("Authorization"))


class NamesFailedTurns(SmallRouter):
    """A turn counts from its beginning."""

    def prefill_params(self, name: str, body: Body, conversation: str) -> Body:
        params = super().prefill_params(name, body, conversation)
        if conversation:
            self.turn_ended(conversation, name)
        return params


class WrongKeeper(SmallRouter):
    """P is told to read from itself."""

    def prefill_params(self, name: str, body: Body, conversation: str) -> Body:
        params = super().prefill_params(name, body, conversation)
        if "remote_port" in params:
            params["remote_port"] = self.prefill_channel[1]
        return params


_PUSH, _PULL = (Mode.PUSH,), (Mode.PULL,)

DEFECTS = (
    Defect(NamesByClientId, ("legs_share_a_fresh_name",)),
    Defect(NamesByPrompt, ("legs_share_a_fresh_name",)),
    Defect(LegsOfTwoNames, ("legs_share_a_fresh_name", "chats_are_handed_off"), _PULL),
    Defect(StreamedPrefill, ("prefill_leg_is_one_whole_token",)),
    Defect(UncappedPrefill, ("prefill_leg_is_one_whole_token",)),
    Defect(UncappedChatPrefill, ("prefill_leg_is_one_whole_token",)),
    Defect(KeepsMinTokens, ("prefill_leg_is_one_whole_token",)),
    Defect(KeepsStreamOptions, ("prefill_leg_is_one_whole_token",)),
    Defect(OneAfterTheOther, ("order_of_legs",), _PUSH),
    Defect(BothAtOnce, ("order_of_legs",), _PULL),
    Defect(WrongAddress, ("decode_leg_has_the_prefill_address",)),
    Defect(KnownFieldsOnly, ("coordinates_are_relayed_as_they_are",), _PULL),
    Defect(CoarseNumbers, ("coordinates_are_relayed_as_they_are",), _PULL),
    Defect(SilentAboutReceivers, ("receivers_are_announced",)),
    Defect(ManyPrefills, ("receivers_are_announced",)),
    Defect(DropsUnknownFields, ("request_reaches_decode_as_it_is",)),
    Defect(CapsDecode, ("request_reaches_decode_as_it_is",)),
    Defect(DropsStop, ("request_reaches_decode_as_it_is",)),
    Defect(DropsLogprobs, ("request_reaches_decode_as_it_is",)),
    Defect(AddsToDecode, ("request_reaches_decode_as_it_is",)),
    Defect(HidesTemplateFromPrefill, ("request_reaches_decode_as_it_is",)),
    Defect(MergesClientParams, ("params_of_clients_have_no_effect",)),
    Defect(ShowsParams, ("params_of_engines_are_kept_from_clients",)),
    Defect(WholeLists, ("prompts_of_a_list_are_handed_off_singly",)),
    Defect(ListsBackwards, ("prompts_of_a_list_are_handed_off_singly",)),
    Defect(NoHandoffForChats, ("chats_are_handed_off",)),
    Defect(HoldsStreams, ("streams_arrive_as_they_are_made",)),
    Defect(DropsWords, ("streams_arrive_as_they_are_made",)),
    Defect(SharesState, ("requests_at_once_are_not_mixed",)),
    Defect(
        LegsOutliveClients,
        ("clients_that_leave_end_the_legs", "clients_that_leave_a_stream_end_it"),
    ),
    Defect(DecodeAlone, ("failed_prefill_is_no_answer", "gone_engines_are_a_failure")),
    Defect(LonelyDecode, ("failed_prefill_is_no_answer",), _PUSH),
    Defect(LonelyPrefill, ("failed_decode_ends_the_prefill",), _PUSH),
    Defect(
        PlainFailures,
        ("failed_prefill_may_be_retried", "failed_decode_may_be_retried"),
    ),
    Defect(
        FailuresWithStatusOk,
        ("failed_prefill_is_no_answer", "failed_decode_is_no_answer"),
    ),
    Defect(RefusalsAreFailures, ("refusals_are_passed_on",)),
    Defect(
        StreamsBeforeTheyBegin,
        ("failed_decode_is_no_answer", "failed_decode_may_be_retried"),
    ),
    Defect(EndsBrokenStreams, ("streams_that_break_off_do_not_end_well",)),
    Defect(RetriesByTheSameName, ("another_try_has_another_name",)),
    Defect(
        ForgetsTurns,
        ("the_turn_before_is_named_to_prefill", "conversations_are_not_mixed"),
    ),
    Defect(ForgetsStreamedTurns, ("the_turn_before_is_named_after_streams",)),
    Defect(OneCaller, ("conversations_are_their_callers_own",)),
    Defect(OneConversation, ("conversations_are_not_mixed",)),
    Defect(NamesFailedTurns, ("failed_turns_are_not_named",)),
    Defect(WrongKeeper, ("the_turn_before_is_named_to_prefill",)),
)

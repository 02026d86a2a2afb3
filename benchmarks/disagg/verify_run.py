# SPDX-License-Identifier: Apache-2.0
"""The course of a verification, from the first question to the report."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import aiohttp

from bench_requests import new_session
from verify_answers import Answer, Kind, compare
from verify_ask import Outcome, Question, Round, ask_again, references
from verify_drill import Drill
from verify_engines import KEPT_BLOCKS, Engines, Told, busy, healthy, retained
from verify_http import AskError, ask, get_object, greedy, tokenize
from verify_judgement import Judgement
from verify_legs import InTurn, RouterWay, Way, legs_of
from verify_moved import failed_causes, movement, problems, settled
from verify_prompts import ANSWER_TOKENS, TURNS, Prompt, Tokens, make_prompts
from verify_result import Report, Unchecked
from verify_targets import Settings, margin_of
from verify_transport import check_backends, check_logs, rank_facts

REACHED = "reachable"
STILL_REACHED = "still reachable"
REFERENCE = "reference"
MOVED = "KV moved"
BLOCKS = "nothing left held"
SIDE_CHANNELS = "side channels"

_REFERENCE_SETTLE_S = 5.0
_CONVERSATION_TOKENS = TURNS * ANSWER_TOKENS + 64
"""What a conversation grows by, and some more."""


def _silent(doing: str) -> None:
    pass


async def verify(settings: Settings, say: Callable[[str], None] = _silent) -> Report:
    """Verify a pair; whatever goes wrong with it is in the report.

    ``say`` is told what is done, for those who wait.

    Raises:
        NoLog: a log that was given cannot be read.
    """
    async with new_session(settings.request_seconds) as session:
        run = _Run(session, settings, say)
        try:
            await run.all()
        except Unchecked as error:
            run.report.unknown("the rest", str(error))
        except AskError as error:
            await run.ended_by(error)
        finally:
            run.engines.close()
        return run.report


class _Run:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: Settings,
        say: Callable[[str], None],
    ) -> None:
        self.session = session
        self.say = say
        self.settings = settings
        self.report = Report()
        self.run = f"verify-{uuid.uuid4().hex[:12]}"
        self._numbers = itertools.count()
        self.engines = self._engines(settings)
        self.router = settings.router
        self._page_bytes: int | None = None

    async def all(self) -> None:
        """Every check in turn."""
        where = self.settings.router or self.settings.decode[0].server
        self.report.title = f"KV hand-off at {where.url}"
        if not await self._reached():
            return
        model, longest = await self._model()
        self.engines.model = model
        before = await self._told()
        states = before.states
        check_backends(self.report, states, self.settings.expect_backend)
        mode, dtype = await self._facts(before)
        margin = self.settings.margin
        margin = margin_of(dtype) if margin is None else margin
        alone = busy(states.values()) == 0
        if alone:
            await self._quiet()
        else:
            self.report.facts.append(("other traffic", "yes: counts are not exact"))

        block = max(state.block_size or 16 for state in states.values())
        prompts = await self._prompts(block, longest)
        questions = await self._references(prompts)
        before = await self.engines.told()
        way = self._way(mode)
        rounds = await self._ask_twice(way, questions)
        outcomes = [outcome for done in rounds for outcome in done.outcomes]
        # Not before: transports connect when they are first used.
        check_logs(self.report, self.settings.logs, self.settings.expect_rails)
        judged = Judgement.of(outcomes, margin)
        opinion = []
        if differing := [one for one in judged.wrong if one.answer is not None]:
            opinion.append(await self._third_opinion(differing, margin))
        if missing := [one.name for one in judged.wrong if one.answer is None]:
            opinion += await self._causes(missing)
        asked = len(rounds) * len(questions)
        judged.tell(self.report, asked, self.settings.strict, opinion)
        names = [o.name for o in outcomes if o.answer is not None]
        await self._movement(before, judged, names, alone)
        await self._blocks(self.settings.settle_seconds, alone)
        if self.settings.drill:
            await self._drill(way, mode, outcomes, margin)

    async def ended_by(self, error: AskError) -> None:
        """A server refused what it was asked, or does not answer any more."""
        if error.status is not None:
            self.report.unknown("the rest", f"{error}")
            return
        problems = [str(error), *await self.engines.health()]
        remedy = "A server stopped answering in the middle: its log has the cause."
        self.report.add(STILL_REACHED, problems, "", remedy)

    async def _reached(self) -> bool:
        """Whether the engines answer; without a router they are asked directly."""
        found = await self.engines.health()
        usable = not found
        for name, server in (("router", self.router), ("single", self.settings.single)):
            if server is not None:
                problem = await healthy(self.session, server.url, f"{name} {server}")
                found += [problem] if problem else []
                if problem and name == "router":
                    self.router = None
                usable = usable and not (problem and name == "single")
        self.report.add(
            REACHED,
            found,
            ", ".join(map(str, self.engines.engines))
            + (f", router {self.router}" if self.router else ""),
            "Is it started, is the URL right, and its port open to this machine? "
            "Without the router the engines are verified all the same; without an "
            "engine nothing is.",
        )
        return usable

    async def _model(self) -> tuple[str, int]:
        """The model's name, and how long a prompt may be."""
        url = self.settings.decode[0].server.url
        listed = (await get_object(self.session, f"{url}/v1/models"))["data"]
        name = self.settings.model or listed[0]["id"]
        card = next((one for one in listed if one["id"] == name), None)
        if card is None:
            served = ", ".join(one["id"] for one in listed)
            raise Unchecked(
                f"{url} serves {served}, not {name!r}: give another --model"
            )
        limit = int(card.get("max_model_len") or 2 * self.settings.long_tokens)
        self.report.facts.append(("model", f"{name}, at most {limit:,} tokens"))
        return name, min(self.settings.long_tokens, limit // 2)

    async def _told(self) -> Told:
        """What engines tell; side channels that cannot be asked are done without."""
        if unknown := self.engines.without_side_channel:
            names = ", ".join(map(str, unknown))
            why = (
                f"not known of {names}, so that counts are those of /metrics alone. To "
                "have more, start the router with "
                "--prefill-side-channel and --decode-side-channel, or give --prefill "
                "and --decode URL,HOST:PORT"
            )
            self.report.facts.append(("side channels", why))
        try:
            return await self.engines.told()
        except Unchecked as error:
            self.report.unknown(
                SIDE_CHANNELS,
                str(error),
                "Records of single hand-offs and tables of blocks are only there; the "
                "checks below go by /metrics.",
            )
            bare = [replace(e, side_channel=None) for e in self.engines.engines]
            # Push is told where P listens, which the router still needs.
            self.engines.engines = bare
            return await self.engines.told()

    async def _facts(self, told: Told) -> tuple[str, str]:
        """Lines about the engines; returns mode and model type as far as known."""
        mode = dtype = ""
        for engine, state in told.states.items():
            if state.connector:
                mode = "push" if "Push" in state.connector else "pull"
            if engine.side_channel is None:
                continue
            document = await self.engines.integrity(engine)
            mode = document["mode"]
            rank = (document.get("ranks") or [{}])[0]
            dtype = rank.get("dtype", "")
            if rank and engine.role == "decode":
                self._page_bytes = rank["block_bytes"] // rank["regions"]
            fact, value = rank_facts(engine, document)
            kept = retained(document)
            value += f"; keeps {kept} blocks of earlier turns" if kept else ""
            self.report.facts.append((fact, value))
        return mode, dtype

    async def _quiet(self) -> None:
        """Wait for what earlier requests hold, which would be taken for ours."""
        seconds = self.settings.drill_seconds
        self.say(f"waiting until nothing is held, {seconds:g} s at most")
        try:
            found = await self.engines.held(seconds)
        except Unchecked:
            return
        self.report.facts += [("held before the first request", one) for one in found]

    async def _prompts(self, block: int, longest: int) -> list[Prompt]:
        url, model = self.settings.decode[0].server.url, self.engines.model

        async def ids(text: str) -> Tokens | None:
            return await tokenize(self.session, url, model, text)

        prompts = await make_prompts(self.settings.seed, block, longest, ids)
        left = [
            p
            for p in prompts
            if not p.conversation
            or TURNS * len(p.tokens) + _CONVERSATION_TOKENS < longest
        ]
        if not left:
            raise Unchecked(
                f"no prompt is as short as {longest} tokens: raise --long-tokens"
            )
        return left

    async def _references(self, prompts: Sequence[Prompt]) -> list[Question]:
        """The right answers, and whether they were really computed."""
        server = self.settings.single or self.settings.decode[0].server
        model = self.engines.model

        async def one(tokens: Tokens) -> Answer:
            # No two share anything in a cache, nor with what is handed off later.
            body = greedy(model, tokens, f"{self._name()}-reference")
            return await ask(self.session, server, body)

        self.say(f"asking {server} alone for the right answers")
        before = await self.engines.told()
        found = await references(prompts, one, self.settings.at_once)
        asked = sum(len(question.tokens) for question in found)
        if self.settings.single is not None:
            said = f"{len(found)} answers of the single engine {server}"
            self.report.add(REFERENCE, [], said, "")
            return found
        computed = await self._computed(before, asked)
        if computed is None or computed < asked:
            self.report.unknown(
                REFERENCE,
                f"{server} tells no prompt tokens by source"
                if computed is None
                else f"{server} computed {computed} of {asked} prompt tokens, and took "
                "the others from a cache",
                "Answers were compared with what D may have been handed earlier. Give "
                "an engine without a connector as --single.",
            )
            return found
        said = f"{server} alone computed all {asked:,} tokens of {len(found)} prompts"
        self.report.add(REFERENCE, [], said, "")
        return found

    async def _computed(self, before: Told, enough: int) -> int | None:
        """Prompt tokens that D computed, once they are told; ``None`` if never."""
        deadline = time.monotonic() + _REFERENCE_SETTLE_S
        while True:
            await self.engines.nudge()
            computed = movement(before, await self.engines.told(), ()).computed
            late = time.monotonic() > deadline
            if computed is None or computed >= enough or late:
                return computed

    def _way(self, mode: str) -> Way:
        if self.router is not None:
            return RouterWay(self.session, self.router)
        prefill, decode = list(self.settings.prefill), list(self.settings.decode)
        self.report.facts.append(("requests", "both legs sent straight to the engines"))
        return InTurn(legs_of(self.session, mode, prefill, decode))

    async def _ask_twice(self, way: Way, questions: list[Question]) -> list[Round]:
        """One by one, and all at once, with nothing cached between the two."""
        rounds = []
        for title, at_once in (("one by one", 1), ("at once", self.settings.at_once)):
            salt = self._name()
            self.say(f"asking all prompts through the hand-off, {title}")

            async def one(question: Question, name: str, salt: str = salt) -> Answer:
                body = greedy(self.engines.model, question.tokens, salt)
                # The time to the first token is wanted of long ones.
                streamed = question.prompt.kind == "long" or name[-1] in "13579"
                talk = question.prompt.conversation
                return await way.answer(
                    {**body, "stream": streamed}, name, f"{salt}-{talk}" if talk else ""
                )

            rounds.append(await ask_again(title, questions, one, self._name, at_once))
            await way.forget(f"{salt}-conversation")
        return rounds

    async def _third_opinion(self, wrong: Sequence[Outcome], margin: float) -> str:
        """Whether P, asked alone, computes what D alone does."""
        question = wrong[0].question
        server = self.settings.prefill[0].server
        body = greedy(self.engines.model, question.tokens, self._name())
        try:
            answer = await ask(self.session, server, body)
        except AskError as error:
            return f"P alone could not be asked: {error}"
        if compare(question.expected, answer, margin).kind in (Kind.EQUAL, Kind.TIE):
            return "P alone gives the reference's answer: it is the KV handed over"
        return "P alone differs from the reference too: compare the engines' options"

    async def _causes(self, names: Sequence[str]) -> list[str]:
        """Why the hand-offs of these requests failed, as far as D tells."""
        try:
            await self.engines.nudge()
            told = await self.engines.told()
        except (AskError, Unchecked):
            return []
        causes = Counter(failed_causes(told, names))
        if not causes and not self.engines.have_side_channels:
            return ["why is told over D's side channel only, and in D's log"]
        if not causes:
            return ["D's side channel has no record of them: is it D's, and not P's?"]
        return [
            f"D says of {count} of them: {cause}"
            for cause, count in causes.most_common()
        ]

    async def _movement(
        self, before: Told, judgement: Judgement, names: list[str], alone: bool
    ) -> None:
        if not names:
            self.report.unknown(MOVED, "no request was answered")
            return
        seconds = self.settings.settle_seconds
        found = await settled(self.engines, before, names, seconds)
        each = found.descriptors / len(names)
        said = (
            f"{found.bytes:,} bytes in {found.transfers} transfers and "
            f"{found.descriptors:,} descriptors ({each:.1f} each) for {len(names)} "
            "requests"
        )
        if found.computed is not None and alone:
            said += f"; D computed {max(found.computed, 0)} prompt tokens itself"
        self.report.add(
            MOVED,
            problems(found, names, alone),
            said,
            "D computes a prompt itself where the legs do not meet: the router sends "
            "no `kv_transfer_params` (its log and `/metrics`), an engine has no "
            "connector, or `kv_load_failure_policy` is `recompute` and the hand-off "
            "fails (D's log, `vllm:nixl_num_failed_handoffs` by kind).",
        )
        self.report.moved = judgement.rows(found, self._page_bytes)

    async def _blocks(self, seconds: float, alone: bool) -> None:
        self.say(f"waiting until nothing is held, {seconds:g} s at most")
        found = await self.engines.held(seconds)
        told = await self.engines.told()
        if found and (not alone or busy(told.states.values())):
            self.report.unknown(
                BLOCKS, f"{found[0]}, but others use the engines", "Run it when idle."
            )
            return
        kept = sum(state.sample(KEPT_BLOCKS) for state in told.states.values())
        but = f", but for {kept:.0f} blocks kept for later turns" if kept else ""
        how = f"every block is free and every table empty{but}"
        if not self.engines.have_side_channels:
            how = f"the engines' cache usage is 0{but}"
        self.report.add(
            BLOCKS,
            found,
            f"{how}, on all engines",
            "After failed requests P keeps prompts that nobody has taken until "
            "`kv_lease_duration` (30 s) has passed: then run it again. Otherwise "
            "`exposed` and `quiescing` blocks come back when the peer answers or its "
            "lease ends, and after 5 s without a peer they are quarantined: see "
            "docs/design/faults.md. What stays is lost until the engine restarts.",
        )

    async def _drill(
        self, way: Way, mode: str, outcomes: Sequence[Outcome], margin: float
    ) -> None:
        longest = [o for o in outcomes if o.answer and o.question.prompt.kind == "long"]
        longest = [o for o in longest if o.round == "one by one"]
        if not longest:
            self.report.unknown("drill", "no long prompt was answered before it")
            return
        best = max(longest, key=lambda o: len(o.question.tokens))
        assert best.answer is not None
        drill = Drill(
            self.engines,
            way,
            legs_of(
                self.session,
                mode,
                [self.settings.prefill[0]],
                [self.settings.decode[0]],
            )[0],
            self.engines.model,
            best.question.tokens,
            best.question.expected,
            best.answer.seconds,
            margin,
            self.settings.drill_seconds,
            self.run,
            self.say,
        )
        await drill.all(self.report)

    def _engines(self, settings: Settings) -> Engines:
        return Engines(
            self.session,
            settings.model or "",
            (*settings.prefill, *settings.decode),
            settings.token,
        )

    def _name(self) -> str:
        return f"{self.run}-{next(self._numbers):04d}"

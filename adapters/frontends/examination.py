"""Meeting engines of which only the address is known, judging each, and releasing those that may be released."""

from collections.abc import Callable, Iterable, Mapping

import anyio
from attrs import frozen

from adapters.engines import HttpEngine, SGLangEngine, VLLMEngine
from lifecycle import events
from lifecycle.fleet import EngineFacts
from lifecycle.ports import Acknowledgement

from .evidence import Evidence
from .release import Case, Finding, Ruling, Verdict, found, release

SPEAKS: Mapping[str, Callable[..., HttpEngine]] = {"sglang": SGLangEngine, "vllm": VLLMEngine}


@frozen(kw_only=True)
class Options:
    """How engines are met, and what may be done to them."""

    dialect: str | None = None
    """`None`: each is asked in every dialect."""
    api_key: str | None = None
    patience: float = 10.0
    """Seconds that a probe may take: a server that is blocked in a dead trainer's rendezvous answers late."""
    release: bool = False
    trust_paused: bool = False


@frozen(kw_only=True)
class Examined:
    """One engine."""

    name: str
    address: str
    case: Case
    finding: Finding


async def examine(urls: Mapping[str, str | None], evidence: Evidence | None, options: Options) -> tuple[Examined, ...]:
    """Look at the engines at `urls`, side by side, and continue those that may be, where `options` say so.

    `urls`: a name for each, `None` for the journal's own or `host:port`.

    Raises `ValueError` for a URL that makes no sense.

    Cancellation: continues under way may or may not have taken effect; to do all of it again is harmless.
    """
    meetings = [_Meeting(url, name, evidence, options) for url, name in urls.items()]
    results: dict[str, Examined] = {}
    async with anyio.create_task_group() as tasks:
        for url, meeting in zip(urls, meetings, strict=True):
            tasks.start_soon(_keep, results, url, meeting)
    return tuple(results[url] for url in urls)


def nowhere(evidence: Evidence, names: Iterable[str]) -> tuple[Examined, ...]:
    """Return those of `names` for which the journal has no address."""
    unknown = Ruling(verdict=Verdict.UNREACHABLE, reason="the journal does not tell where it is")
    return tuple(
        Examined(name=name, address="", case=Case(known=evidence.engines.get(name)), finding=Finding(ruling=unknown))
        for name in names
        if name not in evidence.history.addresses
    )


class _Meeting:
    """With one engine, over connections of its own."""

    def __init__(self, url: str, name: str | None, evidence: Evidence | None, options: Options) -> None:
        kinds = SPEAKS if options.dialect is None else (options.dialect,)
        self._clients = [SPEAKS[kind](url, name=name, api_key=options.api_key) for kind in kinds]
        self._options = options
        self._changed = (lambda: False) if evidence is None else evidence.changed
        self.name, self.address = self._clients[0].name, self._clients[0].address
        known = None
        if evidence is not None and (named := evidence.named(self.name, self.address)) is not None:
            self.name, known = named
        run = "" if evidence is None else evidence.history.run
        self._case = Case(known=known, run=run, trust_paused=options.trust_paused)

    async def work(self) -> Examined:
        """Probe in every dialect that comes into question, and go on in the one that is answered."""
        try:
            answers = await self._answers()
            client, answer = _understood(answers)
            finding = found(self._case, answer)
            if self._options.release:
                finding = await release(
                    client, self._case, finding, changed=self._changed, patience=self._options.patience
                )
        finally:
            with anyio.CancelScope(shield=True):
                for client in self._clients:
                    await client.aclose()
        return Examined(name=self.name, address=self.address, case=self._case, finding=finding)

    async def _answers(self) -> list[tuple[HttpEngine, Acknowledgement]]:
        answers: list[tuple[HttpEngine, Acknowledgement]] = []

        async def ask(client: HttpEngine) -> None:
            probe, facts = events.ProbeEngine(engine=client.name), EngineFacts(name=client.name)
            answers.append((client, await client.perform(probe, facts, timeout=self._options.patience)))

        async with anyio.create_task_group() as tasks:
            for client in self._clients:
                tasks.start_soon(ask, client)
        return answers


def _understood(answers: list[tuple[HttpEngine, Acknowledgement]]) -> tuple[HttpEngine, Acknowledgement]:
    """Return the answer that was understood; where none was, the first with what each dialect got to hear."""
    for client, answer in answers:
        if answer.done:
            return client, answer
    client, answer = answers[0]
    if len({other.detail for _, other in answers}) == 1:
        return client, answer
    told = "; ".join(f"as {other.dialect.kind}: {heard.detail}" for other, heard in answers)
    return client, Acknowledgement(outcome=answer.outcome, detail=f"not understood {told}")


async def _keep(results: dict[str, Examined], url: str, meeting: _Meeting) -> None:
    results[url] = await meeting.work()

"""Moving weights: from opening the channel to the canary, and the ways out of an update that fails."""

from collections.abc import Awaitable, Callable

from lifecycle import events as e
from lifecycle.cohort import Publication
from lifecycle.effects import Result, within
from lifecycle.errors import EngineFailure, PublicationFailed, TransferFailed
from lifecycle.fleet import label_of
from lifecycle.guards import enough_reachable, stopped
from lifecycle.ports import TransferPort
from lifecycle.states import Outcome, Standing
from lifecycle.values import Channel, Member

from .context import Context, Operation, Procedure


class Publishing:
    """Procedures that publish."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._moving: TransferPort | None = None
        """The transfer of the update that is open."""
        self._joined: dict[str, tuple[TransferPort, Channel]] = {}
        """Channels that engines have joined, by name."""
        self._cut: set[str] = set()
        """Those among them that were cut: engines have yet to leave them."""

    def procedures(self) -> dict[type, Procedure]:
        """Return the procedures by request."""
        return {
            e.OpenTransfer: self._open,
            e.BeginUpdate: self._begin,
            e.TransferWeights: self._transfer,
            e.FinishUpdate: self._finish,
            e.VerifyWeights: self._verify,
            e.CommitVersion: self._commit,
            e.FlushCache: self._flush,
            e.LabelVersion: self._label,
            e.Canary: self._canary,
            e.StopTransfer: self._stop,
            e.AbandonUpdate: self._abandon,
            e.CloseTransfer: self._close,
        }

    @property
    def _publication(self) -> Publication:
        publication = self._context.cohort.publication
        if publication is None:
            raise RuntimeError("no publication is open")
        return publication

    # --------------------------------------------------------------------------------------------------- until the end

    async def _open(self, operation: Operation) -> None:
        context = self._context
        transfer = operation.transfer
        if transfer is None:
            raise PublicationFailed("no transfer", [TransferFailed("give the lifecycle or publish() a transfer")])
        timeout = context.effects.allowed(context.deadlines.open_transfer)
        await self._close_sessions(operation)  # those that a publication left behind which went on without them
        # Closing them may have told that an engine was lost, or was started anew and generates.
        cohort, intent = context.cohort, operation.attempt.intent
        if (reason := enough_reachable(cohort, intent) or stopped(cohort, intent)) is not None:
            raise PublicationFailed(
                "an update that was left open could not be closed", [*operation.failures, RuntimeError(reason)]
            )
        self._moving = transfer
        members = [Member(name=f.name, world_size=f.world_size) for f in context.cohort.fleet.reachable]
        try:
            with within(timeout, "preparing the transfer"):
                channel = await transfer.prepare(members, timeout=timeout)
        except Exception as error:
            raise PublicationFailed("the transfer could not be prepared", [error]) from error
        if channel.name not in self._joined:
            result = await context.effects.fan_out(
                e.OpenTransfer,
                [member.name for member in members],
                channel=channel,
                trainer=lambda: transfer.connect(timeout=timeout),
                cut=transfer.stop,
            )
            self._joined[channel.name] = (transfer, channel)
            await self._require_all(result, "the transfer could not be opened")
        intent, run = operation.attempt.intent, context.cohort.run
        if intent.target is None:
            raise PublicationFailed("no version", [ValueError("BEGIN_UPDATE needs a version")])
        context.cohort.publication = Publication(
            target=intent.target,
            label=label_of(run, intent.target),
            channel=channel,
            members=tuple(member.name for member in members),
        )

    async def _begin(self, _: Operation) -> None:
        publication = self._publication
        result = await self._context.effects.fan_out(
            e.BeginUpdate,
            publication.members,
            target=publication.target,
            label=publication.label,
            kind=publication.channel.kind,
        )
        await self._require_all(result, "the update could not be begun")

    async def _transfer(self, operation: Operation) -> None:
        publication, bucket, transfer = self._publication, operation.bucket, self._moving
        if bucket is None or transfer is None:
            raise RuntimeError("TRANSFER needs a bucket and an open transfer")
        timeout = self._context.effects.allowed(self._context.deadlines.transfer)
        publication.sent += 1
        result = await self._context.effects.fan_out(
            e.TransferWeights,
            publication.members,
            target=publication.target,
            label=publication.label,
            index=bucket.index,
            nbytes=bucket.nbytes,
            mode=self._context.cohort.mode,
            bucket=bucket,
            channel=publication.channel,
            trainer=lambda: transfer.send(bucket, timeout=timeout),
            cut=transfer.stop,
        )
        if result.failures:
            raise PublicationFailed(f"bucket {bucket.index} was not transferred", list(result.failures))
        publication.acknowledged += 1
        publication.nbytes += bucket.nbytes
        publication.complete = bucket.last

    async def _finish(self, operation: Operation) -> None:
        publication = self._publication
        result = await self._context.effects.fan_out(
            e.FinishUpdate,
            publication.members,
            target=publication.target,
            label=publication.label,
            kind=publication.channel.kind,
        )
        self._require_enough(operation, result, publication.finished, "finished")

    async def _verify(self, operation: Operation) -> None:
        publication = self._publication
        result = await self._context.effects.fan_out(
            e.VerifyWeights,
            tuple(name for name in publication.members if name in publication.finished),
            target=publication.target,
            label=publication.label,
            kind=publication.channel.kind,
        )
        self._require_enough(operation, result, publication.verified, "passed verification")

    async def _require_all(self, result: Result, message: str) -> None:
        """Raise where any engine failed. One that did not answer may be blocked: it is lost unless a probe answers."""
        if result.failures:
            silent = [n for n, ack in result.acknowledgements.items() if ack.outcome is Outcome.UNKNOWN]
            await self._context.effects.fan_out(e.ProbeEngine, silent)
            raise PublicationFailed(message, list(result.failures))

    def _require_enough(self, operation: Operation, result: Result, succeeded: set[str], did: str) -> None:
        """Go on while enough engines are left; those that failed are fenced at the commit point."""
        required = self._context.cohort.required
        if len(succeeded) < required:
            message = f"{len(succeeded)} of {required} required engines {did}"
            raise PublicationFailed(message, list(result.failures) or [TransferFailed(message)])
        operation.failures.extend(result.failures)

    async def _commit(self, operation: Operation) -> None:
        """The point of no return. Synchronous, so that it happens as a whole or not at all."""
        cohort, books, publication = self._context.cohort, self._context.books, self._publication
        previous, cohort.version = cohort.version, publication.target
        self._context.recorder.emit(e.VersionAdvanced, previous=previous, consumed=operation.consumed)
        for name in publication.members:
            if name in publication.verified:
                cohort.fleet.update(name, version=publication.target, unfit="")
                books.clean(name, f"holds version {publication.target}")
                books.fence(name, Standing.STALE, "awaits its canary")
            else:
                books.fence(name, Standing.STALE, f"did not take version {publication.target}")
        for name in set(cohort.fleet) - set(publication.members):
            books.fence(name, Standing.STALE, f"missed version {publication.target}")
        if previous is None:
            cohort.budget.restore(publication.target)
        else:
            cohort.budget.advance(publication.target, operation.consumed)
        operation.published = tuple(name for name in publication.members if name in publication.verified)
        cohort.publication = None
        self._moving = None

    # ------------------------------------------------------------------------------------------ after the commit point

    async def _flush(self, operation: Operation) -> None:
        mode = self._context.cohort.mode
        names = self._context.reachable_of(operation.published)
        result = await self._context.effects.fan_out(e.FlushCache, names, mode=mode)
        if not mode.keeps_requests:
            # Kept requests may hold on to their cache: that is what the mode was chosen for. Here none is left.
            self._fence_failed(operation, result, "serves caches of old weights")

    async def _label(self, operation: Operation) -> None:
        label = label_of(self._context.cohort.run, self._context.cohort.version or 0)
        names = self._context.reachable_of(operation.published)
        result = await self._context.effects.fan_out(e.LabelVersion, names, label=label)
        self._fence_failed(operation, result, "labels its tokens with another version")

    async def _canary(self, operation: Operation) -> None:
        cohort, books = self._context.cohort, self._context.books
        unfit = {f.engine for f in operation.failures if isinstance(f, EngineFailure)}
        names = [
            name
            for name in self._context.reachable_of(operation.published)
            if name not in unfit and cohort.ledger.owed(name) is None
        ]
        if cohort.policy.canary:
            result = await self._context.effects.fan_out(e.Canary, names)
            self._fence_failed(operation, result, "does not generate")
            # A pause that landed late is why it hangs: then it is in debt, and somebody knows.
            await self._context.effects.fan_out(
                e.ProbeEngine, [n for n in names if not result.acknowledgements[n].done]
            )
            names = [name for name in names if result.acknowledgements[name].done]
        for name in names:
            books.serve(name)
        self._context.segments.changed.give()

    def _fence_failed(self, operation: Operation, result: Result, reason: str) -> None:
        operation.failures.extend(result.failures)
        for name, acknowledgement in result.acknowledgements.items():
            if not acknowledgement.done:
                self._context.books.unfit(name, f"{reason}: {acknowledgement.detail}")

    # ------------------------------------------------------------------------------------------------------- ways out

    async def _stop(self, operation: Operation) -> None:
        """Cut the channel of the update that is open: it may be half-way through a collective."""
        transfer, self._moving = self._moving, None
        if transfer is not None:
            self._cut |= {name for name, (joined, _) in self._joined.items() if joined is transfer}
            await self._release(operation, transfer.stop)

    async def _abandon(self, operation: Operation) -> None:
        """Close what sessions are open, and let engines leave channels that were cut."""
        publication = self._context.cohort.publication
        channel = publication.channel if publication else None
        await self._close_sessions(operation, channel)
        self._context.cohort.publication = None
        for _, cut in [self._joined[name] for name in self._cut & self._joined.keys()]:
            await self._leave(cut)
        self._cut.clear()

    async def _close_sessions(self, operation: Operation, channel: Channel | None = None) -> None:
        context = self._context
        names = [f.name for f in context.cohort.fleet.reachable if f.session]
        kind = channel.kind if channel else ""
        result = await context.effects.fan_out(e.AbandonUpdate, names, kind=kind, channel=channel)
        operation.failures.extend(result.failures)
        for name, acknowledgement in result.acknowledgements.items():
            if not acknowledgement.done:
                context.books.fence(name, Standing.LOST, f"its update is still open: {acknowledgement.detail}")
        # Untouched is also what a process says that was started anew meanwhile, with whatever weights.
        restored = [name for name in names if context.cohort.fleet[name].serving]
        await context.effects.fan_out(e.ProbeEngine, restored)

    async def _close(self, operation: Operation) -> None:
        for transfer, channel in list(self._joined.values()):
            await self._leave(channel)
            await self._release(operation, transfer.close)
        if operation.transfer is not None:
            await self._release(operation, operation.transfer.close)

    async def _release(self, operation: Operation, way_out: Callable[[], Awaitable[None]]) -> None:
        """Call what ends a transfer. A way out goes on, whatever a transfer raises."""
        try:
            await way_out()
        except Exception as error:  # noqa: BLE001 - a transfer may fail in any way; the error is kept and reported
            operation.failures.append(error)

    async def _leave(self, channel: Channel) -> None:
        """Tell engines to leave a channel. One that does not is none the worse: the channel's name is never reused."""
        if self._joined.pop(channel.name, None) is not None:
            names = self._context.reachable_of(channel.rank_offsets or self._context.reachable)
            await self._context.effects.fan_out(e.CloseTransfer, names, channel=channel)

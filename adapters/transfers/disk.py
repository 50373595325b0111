"""Publish weights as a checkpoint on a file system that trainer and engines share."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file

from adapters.transfers.buckets import make_buckets
from lifecycle.errors import TransferFailed, UnusableWeights
from lifecycle.ports import Bucket, Channel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lifecycle.ports import Member, WeightSource

__all__ = ["Disk"]

SHARD_BYTES = 5 * 10**9
"""Size of a file in bytes, that of Hugging Face's own sharded checkpoints."""

_PUBLISHED = re.compile(r"version-\d{8,}(-\d+)?")
_HIDDEN = re.compile(r"\.version-\d{8,}(-\d+)?\.(partial|old)-[0-9a-f]{12}")
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|index\.json)")


class Disk:
    """Write each version to a fresh directory, and let the engines load it from there.

    A directory appears under its name only when it is complete: it is written under a hidden name, flushed to the disk
    and renamed. None is ever written twice, since an engine may be reading it: a version that is there already, from
    an attempt that failed, gets a second directory. `directory` belongs to one trainer at a time.

    Args:
        directory: Where versions are written; it and its parents are created.
        keep: How many versions stay, the newest included, ≥ 1. Older ones go once a later one is there.
        template: A model directory whose other files (config.json, tokenizer, ...) are copied beside the weights, so
            that each version is a checkpoint from which an engine can also be started. `None` for weights alone.
        shard_bytes: Largest weights file in bytes; a larger model gets several and an index.
        seen_as: `directory` as the engines see it, where they mount it elsewhere; `None` for the same absolute path.
        fsync: Whether to wait until the disk has it, so that not even a power cut leaves a torn version.

    Raises:
        ValueError: If a number makes no sense, or the template is no directory.
    """

    kind = "disk"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        template: str | os.PathLike[str] | None = None,
        shard_bytes: int = SHARD_BYTES,
        seen_as: str | None = None,
        fsync: bool = True,
    ) -> None:
        if keep < 1 or shard_bytes < 1:
            raise ValueError(f"keep and shard_bytes are at least 1, not {keep} and {shard_bytes}")
        self._directory = Path(directory).absolute()
        self._template = None if template is None else Path(template)
        if self._template is not None and not self._template.is_dir():
            raise ValueError(f"the template {self._template} is not a directory")
        self._keep = keep
        self._shard_bytes = shard_bytes
        self._seen_as = Path(seen_as) if seen_as is not None else self._directory
        self._fsync = fsync
        self._channel = Channel(kind=self.kind, name=f"disk-{uuid.uuid4().hex[:12]}")

    async def prepare(self, members: Sequence[Member], *, timeout: float) -> Channel:
        """Return the channel, which is the same for all members and always whole.

        Cancellation: nothing is left open.
        """
        del members, timeout
        return self._channel

    async def connect(self, *, timeout: float) -> None:
        """Do nothing: a file system needs no introduction.

        Cancellation: nothing to leave.
        """

    def buckets(self, source: WeightSource, version: int) -> Iterator[Bucket]:
        """Write `source`, on the caller's thread, and yield the one bucket that names the finished directory.

        Written before anything is yielded, since engines are told to load as soon as they are told of the bucket.

        Raises:
            UnusableWeights: If the source is empty, a name comes twice, or the format does not know a dtype.
            TransferFailed: If the files can't be written. Nothing is left of them.
        """
        if version < 0:
            raise ValueError(f"a version is at least 0, not {version}")
        stem = f"version-{version:08d}"
        partial = self._directory / f".{stem}.partial-{uuid.uuid4().hex[:12]}"
        try:
            self._sweep()
            partial.mkdir(parents=True)
            shards = self._write(source, partial)
            self._copy_template(partial)
            published = self._publish(partial, stem)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, (OSError, SafetensorError)):
                raise TransferFailed(f"version {version} can't be written to {self._directory}: {error}") from error
            raise
        self._prune(published)
        yield Bucket(
            index=0,
            last=True,
            names=tuple(name for shard in shards for name in shard.names),
            dtypes=tuple(dtype for shard in shards for dtype in shard.dtypes),
            shapes=tuple(shape for shard in shards for shape in shard.shapes),
            nbytes=sum(shard.nbytes for shard in shards),
            path=str(self._seen_as / published.name),
        )

    async def send(self, bucket: Bucket, *, timeout: float) -> None:
        """Do nothing: the engines read what is there already.

        Cancellation: nothing to leave.
        """

    async def stop(self) -> None:
        """Do nothing: nobody is blocked in a file. Idempotent.

        Cancellation: nothing to leave.
        """

    async def close(self) -> None:
        """Do nothing: what was published stays. Idempotent.

        Cancellation: nothing to leave.
        """

    def _write(self, source: WeightSource, partial: Path) -> list[Bucket]:
        """Write the weights shard by shard, holding one shard in memory; return the shards without their tensors."""
        shards: list[Bucket] = []
        for shard in make_buckets(source, bucket_bytes=self._shard_bytes, atomic=None):
            tensors = dict(zip(shard.names, shard.payload, strict=True))
            try:
                save_file(tensors, partial / f"{shard.index}.partial", metadata={"format": "pt"})
            except (KeyError, RuntimeError, ValueError) as error:
                raise UnusableWeights(f"safetensors does not store this: {str(error)[:300]}") from error
            del tensors
            shards.append(
                Bucket(
                    index=shard.index,
                    last=shard.last,
                    names=shard.names,
                    dtypes=shard.dtypes,
                    shapes=shard.shapes,
                    nbytes=shard.nbytes,
                )
            )
        for shard in shards:
            path = (partial / f"{shard.index}.partial").rename(partial / _file_name(shard.index, len(shards)))
            # safetensors leaves the file to its owner alone, and an engine may be another user.
            path.chmod(partial.stat().st_mode & 0o666)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
                "weight_map": {name: _file_name(shard.index, len(shards)) for shard in shards for name in shard.names},
            }
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        return shards

    def _copy_template(self, partial: Path) -> None:
        for path in sorted(self._template.iterdir()) if self._template is not None else ():
            if path.is_file() and not _WEIGHTS.fullmatch(path.name):
                shutil.copyfile(path, partial / path.name)

    def _publish(self, partial: Path, stem: str) -> Path:
        if self._fsync:
            for path in (*partial.iterdir(), partial):
                _flush(path)
        published, attempt = self._directory / stem, 1
        while published.exists():
            attempt += 1
            published = self._directory / f"{stem}-{attempt}"
        partial.rename(published)
        if self._fsync:
            _flush(self._directory)
        return published

    def _prune(self, published: Path) -> None:
        """Remove what is older than the newest `keep`. A version that can't be removed is no reason to fail."""
        others = [path for path in self._directory.iterdir() if _PUBLISHED.fullmatch(path.name) and path != published]
        # By age, not by number: a run that went back to an earlier checkpoint publishes smaller numbers again.
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in others[self._keep - 1 :]:
            hidden = path.with_name(f".{path.name}.old-{uuid.uuid4().hex[:12]}")
            try:
                path.rename(hidden)  # so that no half of it is ever seen under its name
            except OSError:
                continue
            shutil.rmtree(hidden, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what an attempt that was killed has left."""
        for path in self._directory.iterdir() if self._directory.is_dir() else ():
            if _HIDDEN.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

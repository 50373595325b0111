"""Versions on disk: whole or not there."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapters.transfers import Disk, StateDictSource
from lifecycle.errors import TransferFailed, UnusableWeights
from lifecycle.ports import Bucket, Member

from .peers import ROOT

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(2.5, dtype=torch.bfloat16), "c": torch.empty(0, 3)}


def publish(disk: Disk, version: int, weights: dict[str, Tensor] = WEIGHTS) -> Bucket:
    """Publish, and return the one bucket."""
    (bucket,) = disk.buckets(StateDictSource(weights), version)
    return bucket


def read(bucket: Bucket) -> dict[str, Tensor]:
    """Load what an engine would load."""
    assert bucket.path is not None
    return {name: t for file in sorted(Path(bucket.path).glob("*.safetensors")) for name, t in load_file(file).items()}


def names(directory: Path) -> list[str]:
    """List a directory."""
    return sorted(path.name for path in directory.iterdir())


def test_a_version_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    """The bucket names an absolute directory that holds every tensor as it was."""
    bucket = publish(Disk(tmp_path / "new" / "weights"), 7)
    assert bucket.path == str(tmp_path / "new" / "weights" / "version-00000007")
    assert (bucket.last, bucket.names, bucket.nbytes) == (True, ("a", "b", "c"), 26)
    got = read(bucket)
    assert {name: (t.dtype, t.shape) for name, t in got.items()} == {n: (t.dtype, t.shape) for n, t in WEIGHTS.items()}
    assert all(torch.equal(got[name], tensor) for name, tensor in WEIGHTS.items())


def test_a_large_model_is_sharded_with_an_index(tmp_path: Path) -> None:
    """Above the shard size there are several files and the index that Hugging Face loaders read."""
    bucket = publish(Disk(tmp_path, shard_bytes=24), 1)
    directory = Path(bucket.path or "")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert names(directory) == [first, second, "model.safetensors.index.json"]
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 26}, "weight_map": {"a": first, "b": second, "c": second}}
    assert set(read(bucket)) == set(WEIGHTS)


def test_template_files_make_it_a_checkpoint_and_its_weights_are_left_out(tmp_path: Path) -> None:
    """Configuration and tokenizer come along, the template's own weights do not."""
    template = tmp_path / "template"
    template.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "old.bin"):
        (template / name).write_text("{}")
    bucket = publish(Disk(tmp_path / "weights", template=template), 1)
    assert names(Path(bucket.path or "")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert set(read(bucket)) == set(WEIGHTS)


def test_other_users_can_read_the_weights(tmp_path: Path) -> None:
    """Files have the permissions that any new file has, not those of a private temporary file."""
    (tmp_path / "plain").touch()
    bucket = publish(Disk(tmp_path), 1)
    mode = (Path(bucket.path or "") / "model.safetensors").stat().st_mode
    assert stat.S_IMODE(mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_older_versions_go_once_a_later_one_is_there(tmp_path: Path) -> None:
    """The newest `keep` stay, foreign files are left alone."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "version-final").mkdir()
    disk = Disk(tmp_path, keep=2)
    for version in (8, 9, 10):
        publish(disk, version)
    assert names(tmp_path) == ["notes.txt", "version-00000009", "version-00000010", "version-final"]


def test_going_back_to_smaller_numbers_keeps_the_newest(tmp_path: Path) -> None:
    """A run that restarts from an earlier checkpoint does not lose what it has just written."""
    disk = Disk(tmp_path, keep=1)
    publish(disk, 9)
    publish(disk, 3)
    assert names(tmp_path) == ["version-00000003"]


def test_a_version_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    """Publishing a version again writes a second directory, since an engine may be reading the first."""
    disk = Disk(tmp_path, keep=3)
    first = publish(disk, 7)
    second = publish(disk, 7, {"a": torch.ones(1)})
    third = publish(disk, 7, {"a": torch.ones(2)})
    assert [Path(b.path or "").name for b in (first, second, third)] == [
        "version-00000007",
        "version-00000007-2",
        "version-00000007-3",
    ]
    assert [list(read(b)["a"].shape) for b in (first, second, third)] == [[2, 3], [1], [2]]


def test_a_trainer_killed_before_the_rename_leaves_no_version(tmp_path: Path) -> None:
    """A crash between write and rename leaves nothing that looks like a version, and the next run cleans up."""
    script = (
        "import os, sys, torch; from pathlib import Path; from adapters.transfers import Disk, StateDictSource\n"
        "Path.rename = lambda self, target: os._exit(9) if 'version' in str(target.name) else os.rename(self, target) "
        "or target\n"
        "list(Disk(sys.argv[1]).buckets(StateDictSource({'a': torch.ones(4)}), 7))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    crashed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=False)
    (left,) = names(tmp_path)
    assert (crashed.returncode, left.startswith(".version-00000007.partial-")) == (9, True)
    publish(Disk(tmp_path), 7)
    assert names(tmp_path) == ["version-00000007"]


def test_a_source_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """The error of a gather comes through, and no file stays."""

    class Failing:
        def tensors(self) -> Iterator[tuple[str, Tensor]]:
            yield "a", torch.ones(8)
            raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        list(Disk(tmp_path, shard_bytes=1).buckets(Failing(), 1))
    assert names(tmp_path) == []


def test_a_full_disk_is_a_failed_transfer_and_leaves_nothing(tmp_path: Path) -> None:
    """Running out of space names version and place; no half directory stays, and older versions are untouched."""
    publish(Disk(tmp_path), 1)
    script = (
        "import resource, signal, sys, torch; from adapters.transfers import Disk, StateDictSource\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))\n"
        "list(Disk(sys.argv[1]).buckets(StateDictSource({'a': torch.ones(40000)}), 2))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    failed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, check=False, capture_output=True, text=True
    )
    assert f"TransferFailed: version 2 can't be written to {tmp_path}" in failed.stderr
    assert names(tmp_path) == ["version-00000001"]


def test_a_place_that_cannot_be_written_is_a_failed_transfer(tmp_path: Path) -> None:
    """A file where the directory should be is reported as such."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TransferFailed, match="version 1 can't be written"):
        publish(Disk(tmp_path / "file" / "weights"), 1)


def test_tensors_that_the_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    """Overlapping views are an error about the weights, not about the disk."""
    whole = torch.zeros(4)
    with pytest.raises(UnusableWeights, match="share memory"):
        publish(Disk(tmp_path), 1, {"a": whole, "b": whole[:2]})
    assert names(tmp_path) == []


def test_engines_may_see_the_directory_elsewhere(tmp_path: Path) -> None:
    """The path in the bucket is the one that engines use."""
    assert publish(Disk(tmp_path, seen_as="/mnt/weights"), 4).path == "/mnt/weights/version-00000004"


@pytest.mark.parametrize("options", [{"keep": 0}, {"shard_bytes": 0}, {"template": "/no/such/template"}])
def test_senseless_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """Misuse is told at once."""
    with pytest.raises(ValueError, match=r"at least 1|not a directory"):
        Disk(tmp_path, **options)


def test_a_negative_version_is_refused(tmp_path: Path) -> None:
    """Versions count from 0."""
    with pytest.raises(ValueError, match="at least 0"):
        publish(Disk(tmp_path), -1)


@pytest.mark.anyio
async def test_the_channel_stands_for_all_members(tmp_path: Path) -> None:
    """Members come and go without a new channel, and the rest of the protocol asks nothing."""
    disk = Disk(tmp_path)
    channel = await disk.prepare([Member(name="a", world_size=1)], timeout=1.0)
    await disk.connect(timeout=1.0)
    await disk.send(publish(disk, 1), timeout=1.0)
    await disk.stop()
    await disk.close()
    assert await disk.prepare([Member(name="b", world_size=2)], timeout=1.0) == channel
    assert (channel.kind, disk.kind) == ("disk", "disk")

"""The demo's policy on disk, for servers that are started by hand."""

from pathlib import Path

from adapters.engines.embedded import CheckpointError, load_config, save

from .trainer import new_model


def write_model(directory: Path, *, seed: int) -> None:
    """Write an untrained policy to `directory` in the Hugging Face layout, readable by everybody.

    Raises `ValueError` for a place that cannot be written, or that holds anything but a model of the demo.
    """
    model = new_model(seed)
    try:
        if directory.exists() and any(directory.iterdir()) and load_config(directory) != model.config:
            raise ValueError(f"{directory} holds another model, which is left as it is")
        save(model, directory)
        directory.chmod(0o755)
        for file in directory.iterdir():
            file.chmod(0o644)
    except CheckpointError:
        raise ValueError(f"{directory} holds something else, which is left as it is") from None
    except OSError as error:
        raise ValueError(f"{directory} cannot be written: {error}") from error

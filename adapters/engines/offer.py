"""What a server offers, as its OpenAPI description tells: to find out by trying would do things."""

from collections.abc import Mapping
from typing import Any, Self

from attrs import frozen

from .dialect import Reply, field_of, status_of

DESCRIPTION = "/openapi.json"
"""Where FastAPI servers describe themselves; it takes them about a second the first time."""


@frozen
class Offer:
    """The routes of one server, and what they take. One that does not describe itself counts as offering everything."""

    _paths: Mapping[str, Any] | None = None
    _schemas: Mapping[str, Any] = {}

    @classmethod
    def of(cls, reply: Reply) -> Self:
        """Read what the server answered there."""
        paths = field_of(reply, "paths")
        return cls(paths if isinstance(paths, dict) else None, _at(field_of(reply, "components"), "schemas") or {})

    def lacking(self, *paths: str) -> tuple[str, ...]:
        """Return those of `paths` that the server does not have."""
        return () if self._paths is None else tuple(path for path in paths if path not in self._paths)

    def takes(self, path: str, parameter: str) -> bool:
        """Whether POST `path` reads a query parameter of this name."""
        if self._paths is None:
            return True
        parameters = _at(self._posted(path), "parameters")
        return any(_at(taken, "name") == parameter for taken in parameters or ())

    def choices(self, path: str, key: str) -> frozenset[str] | None:
        """Return the values that `key` may have in the body of POST `path`; `None` where none are named.

        A POST without a body, or a body without that key, has no choice: the set is empty then.
        """
        if self._paths is None:
            return None
        posted = self._posted(path)
        if isinstance(posted, Mapping) and "requestBody" not in posted:
            return frozenset()
        properties = self._resolved(_at(posted, "requestBody", "content", "application/json", "schema"))
        if not isinstance(properties, dict):
            return None
        if key not in properties:
            return frozenset()
        named = _at(properties, key, "enum")
        return frozenset(str(value) for value in named) if isinstance(named, list) else None

    def reads(self, path: str, key: str) -> bool:
        """Whether the body of POST `path` may hold `key`. What is not described may."""
        properties = self._resolved(_at(self._posted(path), "requestBody", "content", "application/json", "schema"))
        return not isinstance(properties, dict) or key in properties

    def _resolved(self, schema: Any) -> Any:
        """Return the properties of a body, described where it is used or by reference."""
        name = str(_at(schema, "$ref") or "").rpartition("/")[2]
        return _at(self._schemas if name else schema, *([name] if name else []), "properties")

    def _posted(self, path: str) -> Any:
        return _at(self._paths, path, "post")


def _at(tree: Any, *keys: str) -> Any:
    """Return what lies under `keys`, one inside the other; `None` where nothing does."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def described(reply: Reply) -> bool:
    """Whether the server answered for itself: with its description, or with a refusal to give one."""
    return 0 < status_of(reply) < 500

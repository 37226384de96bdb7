"""The paths of requests, and which of them are Anthropic's API."""

from starlette.types import Scope

MESSAGES_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Every error on these paths has Anthropic's format."""


def routed_path(scope: Scope) -> str:
    """Return the path that routes are matched against, without the root path. Never uses the Host header."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and (path == root or path.startswith(root + "/")) else path

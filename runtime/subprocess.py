"""How a Python process of our own is started."""

import json
import sys


def python_command(module: str) -> list[str]:
    """Return the command that calls `main()` of *module* in a new interpreter with this one's import path."""
    start = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main()"
    return [sys.executable, "-c", start, json.dumps(sys.path)]

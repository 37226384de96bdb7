"""A log of answers as JSON lines: what `slipstream simulate` replays drafts against.

Each line has the prompt, the answer and how it was sampled, the seed included: draft and target share the noise that
the seed determines, so a draft model can be asked again for what it would have drafted.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from protos.errors import ConfigError
from protos.messages import TokenOutput
from protos.sampling import SamplingParams

LINE_END = b"\n"
NOT_LOGGED = frozenset({"n", "logprobs", "prompt_logprobs", "detokenize", "truncate_prompt_tokens"})
"""Parameters that do not change the tokens of one answer, or whose effect is in the logged prompt already."""


class LoggedOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One answer, a line of the log.

    Attributes:
        prompt_token_ids, output_token_ids: as they were fed and sampled, the end-of-sequence token included.
        model: the target's Hub id or folder.
        prompt, output: their texts; None where there is none.
        sampling: the sampling parameters that are not the defaults, under the names of `SamplingParams`.
        finish_reason: "stop" or "length"; "" if it is not known.
        logprobs: for each output token, log-probabilities of the raw logits by token id: the sampled token first,
            then the most likely ones. None if they were not asked for.
    """

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    model: str = ""
    prompt: str | None = None
    output: str | None = None
    sampling: dict[str, Any] = {}
    finish_reason: str = ""
    logprobs: list[dict[int, float]] | None = None


def logged_sampling(params: SamplingParams, seed: int | None) -> dict[str, Any]:
    """Return the parameters that are not the defaults, with the resolved *seed* if it is known; temperature always."""
    defaults = asdict(SamplingParams())
    changed = {
        name: value for name, value in asdict(params).items() if name not in NOT_LOGGED and value != defaults[name]
    }
    return {**changed, "temperature": params.temperature, "max_tokens": params.max_tokens, "seed": seed}


class AnswerRecorder:
    """Collects the outputs of one request for its line of the log."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[dict[int, float]] = []
        self._finish_reason = ""

    def add(self, output: TokenOutput) -> None:
        """Add the output of a step."""
        self.token_ids += output.token_ids
        self._texts.append(output.text)
        self._logprobs += [dict(zip(each.token_ids, each.logprobs, strict=True)) for each in output.logprobs or ()]
        self._finish_reason = output.finish_reason or ""

    def line(self, model: str, prompt: str | None, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> LoggedOutput:
        """Return the line of the answer so far."""
        return LoggedOutput(
            prompt_ids,
            self.token_ids,
            model,
            prompt,
            "".join(self._texts),
            sampling,
            self._finish_reason,
            self._logprobs or None,
        )


def _ends_with_a_line(path: Path) -> bool:
    """Whether a file is empty or ends with a whole line, as far as that can be read."""
    if not path.is_file():  # such as a pipe
        return True
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == LINE_END
    except OSError:
        return True


class OutputLog:
    """Appends lines to a file, which only its owner may read. May be used by several threads.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write the log {path}: {error.strerror}") from None
        self._lock = threading.Lock()
        self._before = b"" if _ends_with_a_line(path) else LINE_END

    def write(self, entry: LoggedOutput) -> None:
        """Append a line, after the end of one that was not written whole. Raises `OSError`."""
        line = msgspec.json.encode(entry) + LINE_END
        with self._lock:
            left = memoryview(self._before + line)
            self._before = LINE_END
            while left:
                left = left[os.write(self._file, left) :]
            self._before = b""

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> "OutputLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

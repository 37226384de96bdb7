"""A server in a process."""

import re
import subprocess


class Running:
    """A server in a process. Its child shares its standard error, which ends when both have ended."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def until(self, words: str) -> str:
        """Return the first line of the log with *words*."""
        assert self.process.stderr is not None
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if words in line:
                return line
        raise AssertionError("".join(seen))

    def url(self) -> str:
        found = re.search(r"http://[\d.:]+", self.until("ready on"))
        assert found is not None
        return found[0]

    def ended(self) -> tuple[int, str]:
        """Return the exit code and the rest of the log, once all its processes have ended."""
        _, log = self.process.communicate(timeout=60)
        return self.process.returncode, log

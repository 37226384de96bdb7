"""The costs of `slipstream simulate`: read from a file, or measured with the target and written to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.cli.console import progress_bar, show_progress
from cluster.files import check_outputs
from cluster.simulate.costs import CostTable, draft_key, read_costs
from cluster.simulate.results import Replay
from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from protos.validation import shown


@dataclass(frozen=True)
class CostOptions:
    """Where the table of costs is, and what is measured if there is none: comma-separated sizes."""

    path: Path
    batch_sizes: str
    contexts: str

    def check(self, *, with_target: bool) -> None:
        """Raise `ConfigError` if the table can neither be read nor measured, before anything is loaded."""
        if self.path.exists():
            read_costs(self.path)
        elif not with_target:
            raise ConfigError(f"there is no {self.path}: give --target to measure the costs and write them there")
        else:
            check_outputs([self.path])
        numbers(self.batch_sizes, "batch_sizes")
        numbers(self.contexts, "contexts")

    def table(self, replays: Sequence[Replay], config: EngineConfig) -> tuple[CostTable, list[str]]:
        """Return the costs, and lines that say where they are from.

        Args:
            replays: whose drafts and numbers of draft tokens are measured.
            config: of the engine that is measured.

        Raises:
            ConfigError: the table is of another model.
        """
        from cluster.simulate.measure import machine, setting  # noqa: PLC0415 - loads torch

        if not self.path.exists():
            measured = measure_costs(replays, config, self.batch_sizes, self.contexts)
            self.path.write_text(measured.as_json(), encoding="utf-8")
            show_progress(f"wrote {self.path}")
        costs = read_costs(self.path)
        where = f"costs: {self.path}, {costs.dtype}, {costs.machine.get('processor', '?')}"
        differences = costs.check(config.model.model, setting(config.model), machine())
        if not differences:
            return costs, [where]
        return costs, [where, f"WARNING: the costs were measured otherwise: {'; '.join(differences)}"]


def measure_costs(replays: Sequence[Replay], config: EngineConfig, batch_sizes: str, contexts: str) -> CostTable:
    """Measure the target of *config*, and the drafts of *replays* with their numbers of draft tokens."""
    from cluster.simulate.measure import Measuring, measure, num_measurements  # noqa: PLC0415 - loads torch

    ks = sorted({each.k for each in replays})
    what = Measuring(numbers(batch_sizes, "batch_sizes") or [], numbers(contexts, "contexts") or [], ks)
    drafts = {draft_key(each.speculative): each.speculative for each in replays}
    scheduler = replace(config.scheduler, max_num_seqs=max(what.rows))
    configs = [replace(config, speculative=each, scheduler=scheduler) for each in drafts.values()]
    with progress_bar("measuring costs", num_measurements(len(configs), what)) as tick:
        return measure(configs, what, show_progress, tick)


def numbers(text: str | None, name: str) -> list[int] | None:
    """Return comma-separated numbers, ascending; None for None. Raises `ConfigError`."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{name} must be numbers from 1 on, separated by commas, got {shown(text)}")
    return sorted({int(word) for word in words})

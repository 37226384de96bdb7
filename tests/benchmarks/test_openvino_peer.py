"""The comparison with OpenVINO GenAI, which is not installed here: what it does without, and its process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from benchmarks import openvino_peer
from benchmarks.openvino_peer import OFF, PLAIN, Peer, equal_share
from benchmarks.shared import openvino_server
from benchmarks.shared.workload import Item
from demo import pair
from tests.support.documents import ROOT

ITEMS = [Item((1, 2), 3), Item((5,), 2)]
FAKE = dedent(f"""
    import os, runpy, sys, types
    from pathlib import Path

    class Config:
        def __init__(self, **fields):
            self.__dict__.update(fields)

    class LLMPipeline:
        def __init__(self, target, *options, **named):
            assert (Path(target) / "exported").exists()
            os.system("echo what a library writes")

        def generate(self, prompt, settings):
            tokens = (prompt[0] * settings.max_new_tokens)[: settings.max_new_tokens]
            wrong = [-1] if hasattr(settings, "max_ngram_size") else tokens[-1:]
            return types.SimpleNamespace(tokens=[tokens[:-1] + wrong])

    class ContinuousBatchingPipeline(LLMPipeline):
        def generate(self, prompts, settings):
            return [
                types.SimpleNamespace(m_generation_ids=super(ContinuousBatchingPipeline, self).generate(*one).tokens)
                for one in zip(prompts, settings)
            ]

    def run(command, check):
        folder = Path(command[-1])
        assert Path(command[command.index("--model") + 1], "config.json").exists()
        folder.mkdir()
        (folder / "exported").touch()

    modules = {{
        "openvino": types.SimpleNamespace(Tensor=lambda ids: ids),
        "numpy": types.SimpleNamespace(array=lambda ids, dtype: ids, int64=None),
        "openvino_genai": types.SimpleNamespace(
            SchedulerConfig=Config, GenerationConfig=Config, LLMPipeline=LLMPipeline,
            ContinuousBatchingPipeline=ContinuousBatchingPipeline, draft_model=lambda *args, **options: None,
        ),
        "subprocess": types.SimpleNamespace(run=run),
    }}
    sys.modules.update(modules)
    sys.argv[:] = sys.argv[-2:]
    runpy.run_path({openvino_server.__file__!r}, run_name="__main__")
""")
"""A Python of an environment with OpenVINO GenAI, where it is a few lines that repeat the prompt."""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    (tmp_path / "fake.py").write_text(FAKE)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I {tmp_path / "fake.py"} "$@"\n')
    path.chmod(0o755)
    return path


@contextmanager
def started(python: Path) -> Iterator[Peer]:
    args = openvino_peer.arguments(["--peer-python", str(python)])
    with openvino_peer.peer(args, *pair()) as process:
        yield process


def test_without_the_peer_one_line_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    openvino_peer.main([])
    (line,) = capsys.readouterr().out.splitlines()
    assert "left out" in line and "`make openvino-peer`" in line
    assert "\nopenvino-peer:" in (ROOT / "Makefile").read_text()


def test_a_python_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        openvino_peer.main(["--peer-python", "/no/python"])
    assert "there is no file /no/python" in capsys.readouterr().err


def test_the_process_exports_and_every_side_answers(python: Path) -> None:
    repeated = [[1, 2, 1], [5, 5]]
    with started(python) as process:
        answers = {name: process.tokens(served, ITEMS) for name, served in openvino_peer.SERVED.items()}
    lookup = answers.pop(openvino_peer.PEER_LOOKUP)
    assert lookup == [[1, 2, -1], [5, -1]]
    assert answers == dict.fromkeys(answers, repeated)


def test_a_process_that_ends_is_reported(python: Path) -> None:
    python.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(RuntimeError, match="the process of OpenVINO ended: 3"), started(python):
        pass


def test_both_sides_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    runs = {OFF: lambda items: [[1, 2, 3, 4]], PLAIN: lambda items: [[1, 2, 9, 4]]}
    figures = openvino_peer.compared("title", runs, [ITEMS[:1]] * 3, [openvino_peer.SINGLE_GOALS[0]])
    assert figures["tokens"] == [4, 4, 4]
    assert figures["equal_tokens"] == {PLAIN: 0.5}
    assert "OpenVINO 50%" in capsys.readouterr().out


def test_tokens_are_equal_up_to_the_first_difference() -> None:
    assert equal_share([[1, 2, 3], [4]], [[1, 9, 3], [4]]) == 0.5

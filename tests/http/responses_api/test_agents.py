"""OpenAI's Agents SDK, unmodified, against a server of our own. Its tracing is off: it would report to OpenAI."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import agents
import openai
import pytest
from agents.items import MessageOutputItem, ToolCallItem, ToolCallOutputItem

from tests.support.serving.http_server import Served
from tests.support.serving.openai_structured_checks import Verdict

T = TypeVar("T")
PAINT = '{"color": "red"}'
CALL = f'<tool_call>{{"name": "paint", "arguments": {PAINT}}}</tool_call>'
RUN = agents.RunConfig(tracing_disabled=True)


@agents.function_tool
def paint(color: str) -> str:
    """Paint the wall."""
    return f"say: It is {color}.<end>"


def with_agent(served: Served, ask: Callable[[agents.Agent[Any]], Awaitable[T]], **options: Any) -> T:
    """Return what *ask* makes of an agent on *served*."""

    async def run() -> T:
        async with openai.AsyncOpenAI(base_url=served.client.base_url, api_key="none", max_retries=0) as client:
            model = agents.OpenAIResponsesModel(model=options.pop("model", "fake"), openai_client=client)
            return await ask(agents.Agent(name="a", instructions="Be brief.", model=model, **options))

    return asyncio.run(run())


def test_text(served: Served) -> None:
    async def ask(agent: agents.Agent[Any]) -> agents.RunResult:
        return await agents.Runner.run(agent, "say: Hello.<end>", run_config=RUN)

    result = with_agent(served, ask)
    assert result.final_output == "Hello."
    assert result.context_wrapper.usage.output_tokens > 0


def test_a_stream(served: Served) -> None:
    async def ask(agent: agents.Agent[Any]) -> tuple[str, str]:
        result = agents.Runner.run_streamed(agent, "say: Hello.<end>", run_config=RUN)
        raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return "".join(each.delta for each in raw if each.type == "response.output_text.delta"), result.final_output

    assert with_agent(served, ask) == ("Hello.", "Hello.")


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_called_and_its_result_read(served: Served, streams: bool) -> None:
    async def ask(agent: agents.Agent[Any]) -> agents.result.RunResultBase:
        asked = f"say: Let me see. {CALL}<end>"
        if not streams:
            return await agents.Runner.run(agent, asked, run_config=RUN)
        result = agents.Runner.run_streamed(agent, asked, run_config=RUN)
        async for _ in result.stream_events():
            pass
        return result

    result = with_agent(served, ask, tools=[paint])
    assert result.final_output == "It is red."
    kinds = [type(item) for item in result.new_items]
    assert kinds == [MessageOutputItem, ToolCallItem, ToolCallOutputItem, MessageOutputItem]


def test_the_history_of_a_run_is_input_of_the_next(served: Served) -> None:
    async def ask(agent: agents.Agent[Any]) -> str:
        first = await agents.Runner.run(agent, f"say: {CALL}<end>", run_config=RUN)
        history: list[Any] = [*first.to_input_list(), {"role": "user", "content": "say: Bye.<end>"}]
        return str((await agents.Runner.run(agent, history, run_config=RUN)).final_output)

    assert with_agent(served, ask, tools=[paint]) == "Bye."


def test_a_typed_answer(served: Served) -> None:
    async def ask(agent: agents.Agent[Any]) -> object:
        asked = 'say: {"color": "red", "is_sure": true}<end>'
        return (await agents.Runner.run(agent, asked, run_config=RUN)).final_output

    settings = agents.ModelSettings(temperature=0.0, top_p=0.9, max_tokens=100, store=False, top_logprobs=2)
    assert with_agent(served, ask, output_type=Verdict, model_settings=settings) == Verdict(color="red", is_sure=True)


def test_errors_are_openais(served: Served) -> None:
    async def ask(agent: agents.Agent[Any]) -> agents.RunResult:
        return await agents.Runner.run(agent, "say: Hello.<end>", run_config=RUN)

    with pytest.raises(openai.NotFoundError, match="does not exist"):
        with_agent(served, ask, model="no")
    with pytest.raises(openai.BadRequestError, match="store is not supported, got True"):
        with_agent(served, ask, model_settings=agents.ModelSettings(store=True))
    with pytest.raises(openai.BadRequestError, match="'web_search'"):
        with_agent(served, ask, tools=[agents.WebSearchTool()])

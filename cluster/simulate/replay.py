"""Replays logged answers with a draft: the rounds of the engine, with the target's tokens from the log."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from msgspec import structs

from cluster.assemble import Assembled
from cluster.simulate.logs import Content, LoggedAnswer
from cluster.simulate.odds import Odds
from cluster.simulate.requests import RecordedSampling, odds_of, output_of
from cluster.simulate.results import Replay, ReplayedAnswer
from cluster.simulate.setup import build, check_drafts, draw_by_odds, draws_drafts, has_odds, is_learned
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.errors import ConfigError, InvalidRequestError, SlipstreamError
from protos.messages import Request, SpeculationStats, Step, TokenOutput
from protos.progress import ProgressCallback
from runtime.text.preprocessor import Preprocessor
from runtime.text.prompts import Prompt

Tick = Callable[[], None]


def replay(
    name: str,
    config: EngineConfig,
    datasets: Seq[Seq[LoggedAnswer]],
    report: ProgressCallback,
    tick: Tick,
    *,
    with_target: bool = False,
) -> Replay:
    """Replay all answers of *datasets* with the draft of *config*, in batches of its `max_num_seqs`.

    Args:
        name: of the draft, for reports.
        config: of the engine.
        datasets: the answers of each log.
        report: called with a line for each stage of loading.
        tick: called after each answer.
        with_target: whether to load and run the target.

    Raises:
        ConfigError: the draft or an answer cannot be replayed.
        ModelError: a checkpoint cannot be loaded.
        SlipstreamError: the draft failed.
    """
    assembled = build(config, report, with_target=with_target)
    try:
        speculative = assembled.config.speculative
        assert speculative is not None, "checked by `build`"
        pairs = [(i, answer) for i, answers in enumerate(datasets) for answer in answers]
        rules = [rule_for(answer, speculative) for _, answer in pairs]
        requests = [_request(assembled, answer, n) for n, (_, answer) in enumerate(pairs)]
        if any(odds_of(request) for request in requests):
            draw_by_odds(assembled)
        outputs = _run(assembled, requests, tick)
        answers = [
            _answer(i, request, *outputs[request.request_id]) for (i, _), request in zip(pairs, requests, strict=True)
        ]
    finally:
        assembled.shutdown()
    counts = {rule: rules.count(rule) for rule in dict.fromkeys(rules)}
    return Replay(name, speculative.num_speculative_tokens, speculative, answers, counts)


def rule_for(answer: LoggedAnswer, speculative: SpeculativeConfig) -> str:
    """Return how the acceptance of drafts for *answer* is found.

    Raises:
        ConfigError: it cannot be.
    """
    if not answer.params.temperature:
        return "greedy: draft tokens equal to the logged ones are accepted"
    if not is_learned(speculative):
        return "sampled: the draft depends on no noise; its tokens are accepted if equal to the logged ones"
    if has_odds(answer, speculative):
        return "sampled: accepted with the probabilities that the logged ones of the target and the draft's own give"
    if draws_drafts(speculative):
        raise ConfigError(
            f"{answer.place} was sampled, and rejection_sample_method {speculative.rejection_sample_method!r} draws "
            "draft tokens with noise of its own: leave it out, replay greedy answers, or log the target's top "
            "probabilities (`generate --top-logprobs 20`), with chains and the rule 'standard'"
        )
    if answer.seed is None:
        return "sampled without a logged seed: the draft's most likely tokens, accepted if equal to the logged ones"
    return "coupled: drafted with the noise of the logged seed, accepted if equal to the logged tokens"


def _answer(dataset: int, request: Request, steps: Seq[Step], stats: SpeculationStats) -> ReplayedAnswer:
    num_tokens, odds = len(output_of(request.sampling)), odds_of(request)
    expected = None if odds is None else odds.expected
    return ReplayedAnswer(dataset, steps, stats, num_tokens, expected, len(request.prompt_token_ids))


def _request(assembled: Assembled, answer: LoggedAnswer, number: int) -> Request:
    """Return the request of the *number*-th answer, with its odds if they count."""
    request = make_request(assembled.preprocessor, answer, str(number))
    speculative, logprobs = assembled.config.speculative, answer.logprobs
    assert speculative is not None, "checked by `build`"
    if logprobs is None or not has_odds(answer, speculative):
        return request
    assert isinstance(request.sampling, RecordedSampling), "as it was made"
    output, vocab_size = request.sampling.output_token_ids, assembled.preprocessor.vocab_size
    if len(logprobs) != len(output) or max(map(max, logprobs)) >= vocab_size:
        raise ConfigError(
            f"{answer.place} has log-probabilities of {len(logprobs)} tokens, up to id {max(map(max, logprobs))}, but "
            f"{len(output)} output tokens and ids below {vocab_size}: give them for each output token"
        )
    odds = Odds(output, logprobs, vocab_size, speculative.rejection_sample_method, number)
    sampling = structs.replace(request.sampling, temperature=answer.params.temperature, odds=odds)
    return structs.replace(request, sampling=sampling)


def make_request(preprocessor: Preprocessor, answer: LoggedAnswer, name: str) -> Request:
    """Return the request whose answer is *answer*. Raises `ConfigError` with the line."""
    try:
        prompt = _ids(preprocessor, answer.prompt, "prompt")
        output = _ids(preprocessor, answer.output, "output")
        room = preprocessor.max_model_len - len(prompt)
        if len(output) > room:
            raise ConfigError(
                f"prompt and output have {len(prompt) + len(output)} tokens, but the context has "
                f"{preprocessor.max_model_len}"
            )
        limit = answer.max_tokens or (len(output) if answer.is_cut else room)
        params = replace(answer.params, seed=answer.seed, max_tokens=min(room, max(limit, len(output))))
        if answer.seed is None:
            params = replace(params, temperature=0.0)
        request = preprocessor.requests(Prompt(None, prompt), params, name)[0]
    except (InvalidRequestError, ConfigError) as error:
        raise ConfigError(f"{answer.place}: {error}") from None
    recorded = RecordedSampling(**structs.asdict(request.sampling), output_token_ids=output)
    return structs.replace(request, sampling=recorded, eos_ids=(), wants_steps=True)


def _ids(preprocessor: Preprocessor, content: Content, name: str) -> tuple[int, ...]:
    if isinstance(content, str):
        return preprocessor.tokenize(content, name, add_special_tokens=name == "prompt")
    return preprocessor.check_ids(content, name)


Outputs = dict[str, tuple[list[Step], SpeculationStats]]


def _run(assembled: Assembled, requests: Seq[Request], tick: Tick) -> Outputs:
    """Return the steps and the statistics of each request."""
    steps: dict[str, list[Step]] = {request.request_id: [] for request in requests}
    stats: dict[str, SpeculationStats] = {}
    assembled.inbox.put(requests)  # type: ignore[attr-defined]  # a `LocalInbox`
    while len(stats) < len(requests):
        for output in assembled.controller.step():
            _add(output, steps[output.request_id])
            if output.finish_reason is not None:
                stats[output.request_id] = output.speculation or SpeculationStats()
                tick()
    check_drafts(assembled)
    return {name: (steps[name], stats[name]) for name in steps}


def _add(output: TokenOutput, steps: list[Step]) -> None:
    if output.error is not None:
        raise SlipstreamError(output.error)
    if output.token_ids:
        steps.append(output.step or Step())

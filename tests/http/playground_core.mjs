// The playground's logic, run by `node`; what fails is thrown.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const core = await import(pathToFileURL(process.argv[2]));
const { Aligner, Clock, Events, Tally, compared, described, readChunk, requestFor, tokensOf } = core;

const texts = (pieces) => pieces.map((piece) => piece.text);
const tokens = (...given) => given.map((text) => ({ text, origin: "accepted" }));
const step = (drafted, accepted, ...origins) => ({
  index: 0, step: 1, drafted, depth: drafted, accepted, tokens: origins.map((origin) => ({ text: "x", origin })),
});

// Events come in pieces that end anywhere.
{
  const events = new Events();
  const stream = ': ping\n\ndata: {"a": "1"}\n\ndata: two\r\n\r\ndata: first\ndata: second\n\ndata: [DONE]\n\n';
  const found = [...stream].flatMap((letter) => events.push(letter));
  assert.deepEqual(found, ['{"a": "1"}', "two", "first\nsecond", "[DONE]"]);
}

// Requests.
{
  const settings = { model: "m", maxTokens: 5, temperature: 0.5, seed: 7, prompt: "hi" };
  const { path, body } = requestFor(settings, false);
  assert.equal(path, "v1/completions");
  assert.deepEqual(body, {
    model: "m", max_tokens: 5, temperature: 0.5, seed: 7, prompt: "hi", stream: true, token_origins: true,
    stream_options: { include_usage: true }, speculative_config: { enabled: false },
  });
  const chat = requestFor({ ...settings, messages: [{ role: "user", content: "hi" }] }, true);
  assert.equal(chat.path, "v1/chat/completions");
  assert.equal(chat.body.speculative_config.enabled, true);
  assert.ok(!("prompt" in chat.body));
}

// Chunks of both endpoints, the last one of usage, and an error in the middle.
assert.deepEqual(readChunk({ choices: [{ text: "a", finish_reason: "stop" }] }),
  { text: "a", steps: [], finish: "stop", error: null });
assert.equal(readChunk({ choices: [{ delta: { content: "b" } }] }).text, "b");
assert.deepEqual(readChunk({ choices: [], metrics: { token_origins: [1] } }).steps, [1]);
assert.equal(readChunk({ error: { message: "no" } }).error, "no");

// Tokens along their text.
{
  const plain = new Aligner();
  assert.deepEqual(texts(plain.push("hello world", tokens("hello", " wor", "ld"))), ["hello", " wor", "ld"]);
  assert.deepEqual(plain.finish(), []);

  const spaceless = new Aligner();
  assert.deepEqual(texts(spaceless.push("def f (", tokens("def", "f", "("))), ["def", " f", " ("]);

  const special = new Aligner();
  const shown = special.push("ab", tokens("<s>", "a", "</i>", "b"));
  assert.deepEqual(texts(shown), ["a", "b"]);

  const emoji = new Aligner();
  assert.deepEqual(texts(emoji.push("", tokens("\ufffd", "\ufffd"))), []);
  const pieces = emoji.push("🦀 ok", tokens(" ok"));
  assert.deepEqual(texts(pieces), ["🦀", " ok"]);

  const late = new Aligner(); // a stop string could have begun with what was held back
  assert.deepEqual(texts(late.push("", tokens("EN", "DING"))), []);
  assert.deepEqual(texts(late.push("E", [])), []);
  assert.deepEqual(texts(late.push("NDING", [])), ["EN", "DING"]);

  const strange = new Aligner();
  assert.deepEqual(texts(strange.push("what is this", tokens("\ufffd"))), []);
  assert.deepEqual(texts(strange.finish()), ["what is this"]);
  assert.equal(new Aligner().finish().length, 0);
}

// No text is lost or doubled, whatever the tokens look like and however the text is cut.
{
  let seed = 1;
  const random = (below) => (seed = (seed * 48271) % 2147483647) % below;
  for (let round = 0; round < 300; round += 1) {
    const aligner = new Aligner();
    const alphabet = ["a", "b", " ", "é", "🦀", "\n"];
    const text = [...Array(20)].map(() => alphabet[random(alphabet.length)]).join("");
    const out = [];
    for (let at = 0; at < text.length; ) {
      const length = 1 + random(4);
      const shownText = text.slice(at, at + length);
      const given = random(4) ? shownText : ["\ufffd", "<pad>", "", "zz"][random(4)];
      out.push(...aligner.push(shownText, tokens(given)));
      at += length;
    }
    out.push(...aligner.finish());
    assert.equal(texts(out).join(""), text);
  }
}

// Figures.
{
  const tally = new Tally();
  assert.equal(tally.rate, null);
  assert.equal(tally.meanLength, null);
  tally.add(step(4, 2, "accepted", "accepted", "correction"));
  tally.add(step(4, 4, "accepted", "accepted", "accepted", "accepted", "bonus"));
  tally.add(step(2, 0, "correction"));
  tally.add(step(0, 0, "plain"));
  assert.deepEqual([tally.tokens, tally.steps, tally.drafting, tally.drafted, tally.accepted], [10, 4, 3, 10, 6]);
  assert.equal(tally.rate, 0.6);
  assert.equal(tally.meanLength, 2.5);
  assert.deepEqual(tally.positions, [2 / 3, 2 / 3, 1 / 2, 1 / 2]);
}
{
  const clock = new Clock(1000);
  assert.equal(clock.firstToken, null);
  assert.equal(clock.speed(5), null);
  clock.tick(1200, 0);
  clock.tick(1500, 4);
  assert.equal(clock.firstToken, 500);
  assert.equal(clock.speed(4), null);
  clock.tick(3500, 24);
  assert.equal(clock.speed(24), 10);
}

// Both sides, and hints.
assert.deepEqual(compared({ text: "same", speed: 30 }, { text: "same", speed: 20 }),
  { same: true, text: "The answers are identical; 1.50 times as fast with speculation." });
assert.match(compared({ text: "abcd", speed: null }, { text: "abXd", speed: null }).text, /from character 3 on/);
{
  const [first, second] = tokensOf(step(3, 1, "accepted", "correction"));
  assert.equal(described(first), "step 1, token 1 of 2: drafted, accepted; 1 of 3 draft tokens accepted");
  assert.match(described(second), /token 2 of 2: sampled by the target in place of a rejected draft token/);
  assert.match(described(tokensOf(step(0, 0, "plain"))[0]), /without a draft$/);
}

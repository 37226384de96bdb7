// What the playground computes, apart from any page: events, requests, tokens against text, and figures.

const GARBLED = "\ufffd";
const FAR_AHEAD = 8; // tokens that are looked at to find where the text goes on

/** Cuts a stream of text into the data of server-sent events. */
export class Events {
  constructor() {
    this.rest = "";
  }

  /** Return the data of every event that *text* completes. */
  push(text) {
    const parts = (this.rest + text).split(/\r?\n\r?\n/);
    this.rest = parts.pop();
    return parts
      .map((part) => part.split(/\r?\n/).filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).replace(/^ /, "")).join("\n"))
      .filter((data) => data !== "");
  }
}

/** Return the path and the body that ask for an answer. */
export function requestFor(settings, speculates) {
  const body = {
    model: settings.model, max_tokens: settings.maxTokens, temperature: settings.temperature, seed: settings.seed,
    stream: true, stream_options: { include_usage: true }, token_origins: true,
    speculative_config: { enabled: speculates },
  };
  if (settings.messages) {
    return { path: "v1/chat/completions", body: { ...body, messages: settings.messages } };
  }
  return { path: "v1/completions", body: { ...body, prompt: settings.prompt } };
}

/** Return what a chunk of either endpoint adds: text, steps, why it ended, an error's message. */
export function readChunk(chunk) {
  if (chunk.error) {
    return { text: "", steps: [], finish: null, error: chunk.error.message };
  }
  const choice = chunk.choices[0];
  return {
    text: choice?.text ?? choice?.delta?.content ?? "",
    steps: chunk.metrics?.token_origins ?? [],
    finish: choice?.finish_reason ?? null,
    error: null,
  };
}

/**
 * Lays tokens along the text they are of. The text is what counts: a token's own text may be a piece of a character,
 * lack a space, or be a special one that is not shown; and text may come later than its tokens.
 */
export class Aligner {
  constructor() {
    this.text = "";
    this.tokens = [];
  }

  /** Take new text and the tokens of a step, each with its step; return pieces of text, each with its token. */
  push(text, tokens) {
    this.text += text;
    this.tokens.push(...tokens);
    const pieces = [];
    for (let piece = this.#next(); piece; piece = this.#next()) {
      pieces.push(piece);
    }
    return pieces;
  }

  /** Return the rest: text that no token fits goes with the last that waits. */
  finish() {
    const token = this.tokens.at(-1) ?? null;
    const rest = this.text;
    this.text = "";
    this.tokens = [];
    return rest ? [{ text: rest, token }] : [];
  }

  #next() {
    if (!this.text || !this.tokens.length) {
      return null;
    }
    const first = this.#match(this.tokens[0].text, 0);
    if (first) {
      return this.#take(first.end, 1);
    }
    if (this.#mayStillCome(this.tokens[0].text)) {
      return null;
    }
    // Pieces of characters, or tokens that are not shown: they share what stands before the next that fits.
    for (let ahead = 1; ahead < Math.min(this.tokens.length, FAR_AHEAD); ahead += 1) {
      const found = this.#match(this.tokens[ahead].text, 2 * ahead);
      if (found) {
        return this.#take(found.start || found.end, found.start ? ahead : ahead + 1);
      }
    }
    return null;
  }

  /** Return where a token's text stands, at most *slack* characters and blanks from the front. */
  #match(text, slack) {
    if (!text || text.includes(GARBLED)) {
      return null;
    }
    const at = this.text.indexOf(text);
    if (at < 0 || this.text.slice(0, at).trim().length > slack) {
      return null;
    }
    return { start: slack ? at : 0, end: at + text.length };
  }

  #mayStillCome(text) {
    return text.startsWith(this.text) && text !== this.text;
  }

  #take(length, count) {
    const text = this.text.slice(0, length);
    this.text = this.text.slice(length);
    const token = this.tokens[count - 1];
    this.tokens.splice(0, count);
    return { text, token };
  }
}

/** Adds up what steps brought. */
export class Tally {
  constructor() {
    this.tokens = 0;
    this.steps = 0;
    this.drafting = 0;
    this.drafted = 0;
    this.accepted = 0;
    this.offered = [];
    this.taken = [];
  }

  add(step) {
    this.steps += 1;
    this.tokens += step.tokens.length;
    if (!step.drafted) {
      return;
    }
    this.drafting += 1;
    this.drafted += step.drafted;
    this.accepted += step.accepted;
    for (let position = 0; position < step.depth; position += 1) {
      this.offered[position] = (this.offered[position] ?? 0) + 1;
      this.taken[position] = (this.taken[position] ?? 0) + (position < step.accepted ? 1 : 0);
    }
  }

  /** Tokens a step gave, null before the first. */
  get meanLength() {
    return this.steps ? this.tokens / this.steps : null;
  }

  /** Share of draft tokens accepted, null where there were none. */
  get rate() {
    return this.drafted ? this.accepted / this.drafted : null;
  }

  /** For each position of the draft, the share of steps that accepted it of those that offered it. */
  get positions() {
    return this.offered.map((offered, position) => this.taken[position] / offered);
  }
}

/** Measures an answer; times in milliseconds, of any clock. */
export class Clock {
  constructor(began) {
    this.began = began;
    this.first = null;
    this.last = null;
    this.atFirst = 0;
  }

  /** Note that there are so many tokens now. */
  tick(now, tokens) {
    if (tokens && this.first === null) {
      this.first = now;
      this.atFirst = tokens;
    }
    this.last = now;
  }

  get firstToken() {
    return this.first === null ? null : this.first - this.began;
  }

  /** Tokens a second, counted from the first ones on; null while nothing can be said. */
  speed(tokens) {
    const seconds = this.first === null ? 0 : (this.last - this.first) / 1000;
    return seconds > 0 && tokens > this.atFirst ? (tokens - this.atFirst) / seconds : null;
  }
}

/** Say how two answers to one request compare. */
export function compared(on, off) {
  const speeds = on.speed && off.speed ? `${(on.speed / off.speed).toFixed(2)} times as fast with speculation` : "";
  if (on.text === off.text) {
    return { same: true, text: ["The same answer, to the letter", speeds].filter(Boolean).join("; ") + "." };
  }
  let at = 0;
  while (at < Math.min(on.text.length, off.text.length) && on.text[at] === off.text[at]) {
    at += 1;
  }
  return {
    same: false,
    text: `The answers differ from character ${at + 1} on: there two tokens were equally likely, or the server samples ` +
      "by a rule that depends on the draft.",
  };
}

const ORIGINS = {
  accepted: "drafted, accepted",
  correction: "the target's, instead of a draft token",
  bonus: "the target's, behind a whole accepted draft",
  plain: "the target's, without a draft",
};

/** Say where a token came from. */
export function described(token) {
  const step = token.step;
  const drafted = step.drafted ? `; ${step.accepted} of ${step.drafted} draft tokens accepted` : "";
  return `step ${step.step}, token ${token.position} of ${step.tokens.length}: ${ORIGINS[token.origin]}${drafted}`;
}

/** Return the tokens of a step, each knowing its step and its place there, counted from 1. */
export function tokensOf(step) {
  return step.tokens.map((token, place) => ({ ...token, step, position: place + 1 }));
}

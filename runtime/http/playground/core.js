// The playground's logic, independent of the page: events, requests, the alignment of tokens with text, and figures.

const GARBLED = "\ufffd";
const FAR_AHEAD = 8; // tokens that are searched for the next text

/** Splits a stream of text into the data of server-sent events. */
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

/** Return the path and the body of a request. */
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

/** Return the new text, steps, finish reason and error message in a chunk of either endpoint. */
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
 * Aligns tokens with the text. The text takes precedence: a token's own text may be part of a character, lack a space,
 * or be a special token that is not shown; and text may arrive later than its tokens.
 */
export class Aligner {
  constructor() {
    this.text = "";
    this.tokens = [];
  }

  /** Add new text and the tokens of steps; return pieces of text, each with its token. */
  push(text, tokens) {
    this.text += text;
    this.tokens.push(...tokens);
    const pieces = [];
    for (let piece = this.#next(); piece; piece = this.#next()) {
      pieces.push(piece);
    }
    return pieces;
  }

  /** Return the rest: text that matches no token is assigned to the last pending token. */
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
    // Parts of characters, or tokens that are not shown: they share the text before the next token that matches.
    for (let ahead = 1; ahead < Math.min(this.tokens.length, FAR_AHEAD); ahead += 1) {
      const found = this.#match(this.tokens[ahead].text, 2 * ahead);
      if (found) {
        return this.#take(found.start || found.end, found.start ? ahead : ahead + 1);
      }
    }
    return null;
  }

  /** Return where a token's text is, after at most *slack* characters and any blanks. */
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

/** Counts tokens over steps. */
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

  /** Mean tokens per step, null before the first. */
  get meanLength() {
    return this.steps ? this.tokens / this.steps : null;
  }

  /** Share of draft tokens accepted, null where there were none. */
  get rate() {
    return this.drafted ? this.accepted / this.drafted : null;
  }

  /** For each position of the draft, the share of the steps with such a position that accepted it. */
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

  /** Record the number of tokens at the time *now*. */
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

  /** Tokens per second after the first ones; null while there are too few. */
  speed(tokens) {
    const seconds = this.first === null ? 0 : (this.last - this.first) / 1000;
    return seconds > 0 && tokens > this.atFirst ? (tokens - this.atFirst) / seconds : null;
  }
}

/** Compare two answers to one request. */
export function compared(on, off) {
  const speeds = on.speed && off.speed ? `${(on.speed / off.speed).toFixed(2)} times as fast with speculation` : "";
  if (on.text === off.text) {
    return { same: true, text: ["The answers are identical", speeds].filter(Boolean).join("; ") + "." };
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
  correction: "sampled by the target in place of a rejected draft token",
  bonus: "sampled by the target after a fully accepted draft",
  plain: "sampled by the target without a draft",
};

/** Describe the origin of a token. */
export function described(token) {
  const step = token.step;
  const drafted = step.drafted ? `; ${step.accepted} of ${step.drafted} draft tokens accepted` : "";
  return `step ${step.step}, token ${token.position} of ${step.tokens.length}: ${ORIGINS[token.origin]}${drafted}`;
}

/** Return the tokens of a step, each with its step and its position there, counted from 1. */
export function tokensOf(step) {
  return step.tokens.map((token, place) => ({ ...token, step, position: place + 1 }));
}

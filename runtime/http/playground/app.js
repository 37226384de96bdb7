// The page: sends requests to the server, and shows the streamed answers.

import { Aligner, Clock, Events, Tally, compared, described, readChunk, requestFor, tokensOf } from "./core.js";

const MAX_STRIP = 160;
const LOOK_EVERY_MS = 5000;
const DEMO = "demo"; // the embedded model writes code; it has a chat template, but is no chat model
const EXAMPLES = {
  complete: "def binary_search(items, target):",
  chat: "Write a haiku about a river.",
};

const $ = (id) => document.getElementById(id);
const state = { kind: "complete", turns: [], typed: { ...EXAMPLES }, running: null };

function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function problemOf(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answered ${response.status}`;
}

function complain(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// The request.

function settings() {
  const prompt = $("prompt").value;
  const given = {
    model: $("model").value || undefined,
    maxTokens: $("max-tokens").valueAsNumber || undefined,
    temperature: Number.isNaN($("temperature").valueAsNumber) ? 0 : $("temperature").valueAsNumber,
    seed: Number.isNaN($("seed").valueAsNumber) ? undefined : $("seed").valueAsNumber,
  };
  if (state.kind === "chat") {
    return { ...given, messages: [...state.turns, { role: "user", content: prompt }] };
  }
  return { ...given, prompt };
}

function choose(kind) {
  state.typed[state.kind] = $("prompt").value;
  state.kind = kind;
  $("prompt").value = state.typed[kind];
  for (const each of ["complete", "chat"]) {
    $(`tab-${each}`).setAttribute("aria-selected", String(each === kind));
  }
  showTurns();
}

function showTurns() {
  const shows = state.kind === "chat" && state.turns.length > 0;
  $("turns").hidden = !shows;
  $("forget").hidden = !shows;
  $("turns").replaceChildren(...state.turns.map((turn) => {
    const item = document.createElement("li");
    item.className = turn.role;
    item.textContent = turn.content;
    return item;
  }));
  $("turns").scrollTop = $("turns").scrollHeight;
}

// The answers.

class Answer {
  constructor(title) {
    this.element = $("answer").content.firstElementChild.cloneNode(true);
    this.element.querySelector("h2").textContent = title;
    this.text = "";
    this.aligner = new Aligner();
    this.tally = new Tally();
    this.clock = new Clock(performance.now());
    this.pre = this.element.querySelector(".text");
    this.group = null; // of the newest step
    this.steps = []; // received since the last frame
    this.pieces = [];
    this.frame = null;
    $("answers").append(this.element);
  }

  begin() {
    this.clock = new Clock(performance.now());
    this.element.classList.add("busy");
  }

  take({ text, steps }) {
    this.text += text;
    for (const step of steps) {
      this.tally.add(step);
    }
    this.clock.tick(performance.now(), this.tally.tokens);
    this.steps.push(...steps);
    this.pieces.push(...this.aligner.push(text, steps.flatMap(tokensOf)));
    // Once per frame: a layout for each step, of which there may be thousands per second, would freeze the page.
    this.frame ??= requestAnimationFrame(() => this.#show());
  }

  end(finish) {
    cancelAnimationFrame(this.frame);
    this.pieces.push(...this.aligner.finish());
    this.#show();
    this.element.classList.remove("busy");
    this.element.dataset.finish = finish ?? "stopped";
  }

  #show() {
    const stuck = this.pre.scrollTop + this.pre.clientHeight >= this.pre.scrollHeight - 8;
    this.frame = null;
    this.#addToStrip(this.steps.splice(0));
    this.pieces.splice(0).forEach((piece) => this.#addPiece(piece));
    this.#showFigures();
    if (stuck) {
      this.pre.scrollTop = this.pre.scrollHeight;
    }
  }

  #addPiece({ text, token }) {
    const span = document.createElement("span");
    span.className = `token ${token?.origin ?? "plain"}`;
    span.textContent = text;
    span.token = token;
    this.#groupOf(token).append(span);
  }

  #groupOf(token) {
    if (!this.group || this.group.step !== token?.step) {
      this.group = document.createElement("span");
      this.group.className = "group";
      this.group.step = token?.step;
      this.pre.append(this.group);
    }
    return this.group;
  }

  #addToStrip(steps) {
    const strip = this.element.querySelector(".strip");
    strip.append(...steps.slice(-MAX_STRIP).map((step) => this.#columnOf(step)));
    while (strip.children.length > MAX_STRIP) {
      strip.firstElementChild.remove();
    }
  }

  #columnOf(step) {
    const column = document.createElement("i");
    column.className = step.tokens.at(-1)?.origin ?? "plain";
    column.style.setProperty("--drafted", step.depth);
    column.style.setProperty("--accepted", step.accepted);
    column.title = step.drafted ? `step ${step.step}: ${step.accepted} of ${step.depth}` : `step ${step.step}: no draft`;
    return column;
  }

  #showFigures() {
    const figure = (name, text) => {
      this.element.querySelector(`[data-figure=${name}]`).textContent = text;
    };
    const { tally, clock } = this;
    const speed = this.speed;
    figure("speed", speed === null ? "–" : speed.toFixed(1));
    figure("first", clock.firstToken === null ? "–" : `${clock.firstToken.toFixed(0)} ms`);
    figure("tokens", String(tally.tokens));
    figure("length", tally.meanLength === null ? "–" : tally.meanLength.toFixed(2));
    figure("rate", tally.rate === null ? "–" : `${(100 * tally.rate).toFixed(0)} %`);
    this.#showPositions();
  }

  #showPositions() {
    const bars = this.element.querySelector(".bars");
    this.tally.positions.forEach((share, position) => {
      const bar = bars.children[position] ?? bars.appendChild(document.createElement("div"));
      bar.style.setProperty("--share", share);
      bar.dataset.position = position + 1;
      bar.dataset.share = `${(100 * share).toFixed(0)}%`;
    });
  }

  get speed() {
    return this.clock.speed(this.tally.tokens);
  }
}

async function stream(answer, request, signal) {
  answer.begin();
  let finish = null;
  try {
    const response = await fetch(request.path, {
      method: "POST", headers: headers(), body: JSON.stringify(request.body), signal,
    });
    if (!response.ok) {
      throw new Error(await problemOf(response));
    }
    finish = await read(response, answer);
  } finally {
    answer.end(finish);
  }
}

async function read(response, answer) {
  const events = new Events();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let finish = null;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    for (const data of events.push(part.value)) {
      if (data === "[DONE]") {
        continue;
      }
      const chunk = readChunk(JSON.parse(data));
      if (chunk.error) {
        throw new Error(chunk.error);
      }
      answer.take(chunk);
      finish = chunk.finish ?? finish;
    }
  }
  return finish;
}

async function run() {
  if (state.running) {
    return;
  }
  state.running = new AbortController();
  $("run").disabled = true;
  $("stop").disabled = false;
  complain("");
  try {
    await answerAll(settings(), state.running.signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      complain(error.message);
    }
  } finally {
    state.running = null;
    $("run").disabled = false;
    $("stop").disabled = true;
  }
}

async function answerAll(request, signal) {
  const mode = $("mode").value;
  const sides = mode === "both" ? [true, false] : [mode === "on"];
  $("answers").replaceChildren();
  $("verdict").textContent = "";
  delete $("verdict").dataset.same;
  const answers = sides.map((speculates) => new Answer(speculates ? "Speculation on" : "Speculation off"));
  // One after the other: in the same batch, they would slow each other down.
  for (const [place, speculates] of sides.entries()) {
    await stream(answers[place], requestFor(request, speculates), signal);
  }
  if (answers.length === 2) {
    const verdict = compared(...answers);
    $("verdict").textContent = verdict.text;
    $("verdict").dataset.same = String(verdict.same);
  }
  if (request.messages) {
    state.turns = [...request.messages, { role: "assistant", content: answers[0].text }];
    $("prompt").value = "";
    showTurns();
  }
}

// The server.

async function look() {
  try {
    const health = await fetch("health", { headers: headers() });
    $("health").textContent = health.ok ? "ready" : "not ready";
    $("health").dataset.ok = String(health.ok);
  } catch {
    $("health").textContent = "gone";
    $("health").dataset.ok = "false";
  }
}

async function listModels() {
  const response = await fetch("v1/models", { headers: headers() }).catch(() => null);
  if (!response?.ok) {
    complain(response?.status === 401 ? "This server requires an API key." : "The server did not list its models.");
    return;
  }
  complain("");
  const { data } = await response.json();
  $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
  await offerChat();
}

/** A model without a chat template cannot chat; `tokenize` reports that without generating anything. */
async function offerChat() {
  const body = JSON.stringify({ messages: [{ role: "user", content: "hello" }] });
  const response = await fetch("tokenize", { method: "POST", headers: headers(), body }).catch(() => null);
  const can = Boolean(response?.ok);
  $("tab-chat").disabled = !can;
  $("tab-chat").title = can ? "" : "This model has no chat template; the server takes one with --chat-template.";
  choose(can && $("model").value !== DEMO ? "chat" : "complete");
}

function hint(event) {
  const token = event.target.token;
  const box = $("hint");
  box.hidden = !token;
  if (!token) {
    return;
  }
  box.textContent = described(token);
  const place = event.target.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(place.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${place.bottom + 6}px`;
}

$("prompt").value = EXAMPLES.complete;
$("tab-complete").addEventListener("click", () => choose("complete"));
$("tab-chat").addEventListener("click", () => choose("chat"));
$("forget").addEventListener("click", () => {
  state.turns = [];
  showTurns();
});
$("run").addEventListener("click", run);
$("stop").addEventListener("click", () => state.running?.abort());
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  listModels();
});
$("answers").addEventListener("pointerover", hint);
$("answers").addEventListener("pointerleave", () => { $("hint").hidden = true; });
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    run();
  } else if (event.key === "Escape") {
    state.running?.abort();
  }
});
setInterval(look, LOOK_EVERY_MS);
look();
listModels();

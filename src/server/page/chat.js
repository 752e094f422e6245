// The conversation: sends it to /v1/chat/completions and shows the answer as it comes.
import { markdown } from "/page/markdown.js";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "max_tokens", "seed"];
const MAX_PICTURE_BYTES = 20 << 20;

let messages = [];
let pictures = [];
let running = null;

export const headers = () => {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

const say = (text, bad = false) => {
  $("status").textContent = text;
  $("status").classList.toggle("error", bad);
};

// ---- settings -----------------------------------------------------------------------------------------------------

const saved = () => { try { return JSON.parse(localStorage.getItem("strata") ?? "{}"); } catch { return {}; } };

function store() {
  const all = { system: $("system").value, thinking: $("thinking").checked };
  for (const name of SETTINGS) all[name] = $(name).value;
  try { localStorage.setItem("strata", JSON.stringify(all)); } catch { /* private windows keep nothing */ }
}

function restore() {
  const all = saved();
  $("system").value = all.system ?? "";
  $("thinking").checked = all.thinking ?? true;
  for (const name of SETTINGS) $(name).value = all[name] ?? "";
}

async function loadProps() {
  try {
    const reply = await fetch("/props", { headers: headers() });
    if (reply.status === 503) { say("The model is loading…"); setTimeout(loadProps, 1000); return; }
    if (reply.status === 401) { say("This server needs an API key (Settings).", true); return; }
    const props = await reply.json();
    $("model").textContent = props.model_alias;
    $("attach-label").hidden = !props.modalities.vision;
    for (const name of SETTINGS) {
      const value = props.default_generation_settings[name];
      if (value !== null && value !== undefined) $(name).placeholder = String(Math.round(value * 1e4) / 1e4);
    }
    say("");
  } catch { say("The server does not answer.", true); setTimeout(loadProps, 3000); }
}

function toggle(button, panel) {
  button.addEventListener("click", () => {
    panel.hidden = !panel.hidden;
    button.setAttribute("aria-expanded", String(!panel.hidden));
    panel.dispatchEvent(new Event("toggle"));
  });
}

// ---- showing ------------------------------------------------------------------------------------------------------

function article(role, name) {
  $("welcome")?.remove();
  const node = document.createElement("article");
  node.className = role;
  const title = document.createElement("h2");
  title.textContent = name;
  const body = document.createElement("div");
  body.className = "body";
  node.append(title, body);
  $("log").append(node);
  return { node, body };
}

function showUser(text, images) {
  const { body } = article("user", "You");
  for (const url of images) {
    const image = document.createElement("img");
    image.src = url;
    image.alt = "Attached picture";
    body.append(image);
  }
  body.append(text);
}

// An answer on the page; draws at most once per frame however fast tokens come.
class AnswerView {
  constructor() {
    const { node, body } = article("assistant", "Model");
    this.node = node;
    this.body = body;
    this.body.classList.add("writing");
    this.text = "";
    this.thinking = "";
    this.drawn = { text: "", thinking: "" };
  }

  add(reasoning, content) {
    this.thinking += reasoning;
    this.text += content;
    this.pending ??= requestAnimationFrame(() => { this.pending = null; this.draw(); });
  }

  draw() {
    const log = $("log");
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    if (this.thinking !== this.drawn.thinking) {
      if (!this.fold) {
        this.fold = document.createElement("details");
        this.fold.className = "thinking";
        const summary = document.createElement("summary");
        summary.textContent = "Thinking";
        this.thought = document.createElement("div");
        this.fold.append(summary, this.thought);
        this.node.insertBefore(this.fold, this.body);
      }
      this.thought.textContent = this.thinking;
      this.drawn.thinking = this.thinking;
    }
    if (this.text !== this.drawn.text) {
      this.body.replaceChildren(...markdown(this.text));
      this.drawn.text = this.text;
    }
    if (follow) log.scrollTop = log.scrollHeight;
  }

  finish(timings, note) {
    if (this.pending) cancelAnimationFrame(this.pending);
    this.draw();
    this.body.classList.remove("writing");
    const footer = document.createElement("footer");
    if (note) footer.append(note);
    if (timings) {
      const parts = [`${timings.predicted_n} tokens`, `${timings.predicted_per_second.toFixed(1)} tok/s`];
      if (timings.draft_n) parts.push(`drafts ${timings.draft_n_accepted}/${timings.draft_n}`);
      if (timings.cache_n) parts.push(`${timings.cache_n} prompt tokens held`);
      for (const part of parts) {
        const span = document.createElement("span");
        span.textContent = part;
        footer.append(span);
      }
    }
    const copy = document.createElement("button");
    copy.type = "button";
    copy.textContent = "Copy answer";
    copy.addEventListener("click", () => {
      navigator.clipboard?.writeText(this.text).then(() => { copy.textContent = "Copied"; });
    });
    footer.append(copy);
    this.node.append(footer);
    $("log").scrollTop = $("log").scrollHeight;
  }
}

// ---- sending ------------------------------------------------------------------------------------------------------

function body() {
  const system = $("system").value.trim();
  const request = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    enable_thinking: $("thinking").checked,
  };
  for (const name of SETTINGS) {
    const value = $(name).value.trim();
    if (value !== "" && Number.isFinite(Number(value))) request[name] = Number(value);
  }
  return request;
}

// The events of a response body.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      for (let end; (end = buffer.indexOf("\n\n")) >= 0; buffer = buffer.slice(end + 2)) {
        for (const line of buffer.slice(0, end).split("\n")) {
          if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function answer() {
  const view = new AnswerView();
  const control = new AbortController();
  running = control;
  busy(true);
  let timings = null;
  let note = "";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body()), signal: control.signal,
    });
    if (!response.ok) {
      const error = (await response.json().catch(() => null))?.error;
      throw new Error(error?.message ?? `The server answered ${response.status}.`);
    }
    say("Answering…");
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      timings = event.timings ?? timings;
      const choice = event.choices?.[0];
      if (!choice) continue;
      view.add(choice.delta.reasoning_content ?? "", choice.delta.content ?? "");
      if (choice.finish_reason === "length") note = "Cut off at the token limit.";
    }
    say("");
  } catch (error) {
    if (error.name === "AbortError") { note = "Stopped."; say(""); } else { note = error.message; say(error.message, true); }
  }
  view.finish(timings, note);
  if (view.text || view.thinking) {
    messages.push({ role: "assistant", content: view.text, ...(view.thinking ? { reasoning_content: view.thinking } : {}) });
  }
  running = null;
  busy(false);
  $("prompt").focus();
}

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  $("log").setAttribute("aria-busy", String(on));
}

function send() {
  const text = $("prompt").value.trim();
  if (running || (!text && !pictures.length)) return;
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  messages.push({ role: "user", content: parts.length ? [...parts, { type: "text", text }] : text });
  showUser(text, pictures);
  pictures = [];
  showPictures();
  $("prompt").value = "";
  $("log").scrollTop = $("log").scrollHeight;
  answer();
}

// ---- pictures -----------------------------------------------------------------------------------------------------

function showPictures() {
  $("pictures").replaceChildren(...pictures.map((url, i) => {
    const item = document.createElement("li");
    const image = document.createElement("img");
    image.src = url;
    image.alt = `Picture ${i + 1}`;
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove picture ${i + 1}`);
    remove.addEventListener("click", () => { pictures.splice(i, 1); showPictures(); $("prompt").focus(); });
    item.append(image, remove);
    return item;
  }));
}

async function attach(files) {
  if ($("attach-label").hidden) return;
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    if (file.size > MAX_PICTURE_BYTES) { say(`${file.name} is larger than 20 MiB.`, true); continue; }
    const url = await new Promise((done, fail) => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result);
      reader.onerror = () => fail(reader.error);
      reader.readAsDataURL(file);
    }).catch(() => null);
    if (url) pictures.push(url);
  }
  showPictures();
}

// ---- wiring -------------------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("prompt").addEventListener("paste", (event) => attach(event.clipboardData?.files ?? []));
$("log").addEventListener("dragover", (event) => event.preventDefault());
$("log").addEventListener("drop", (event) => { event.preventDefault(); attach(event.dataTransfer.files); });
$("attach").addEventListener("change", () => { attach($("attach").files); $("attach").value = ""; });
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("new-chat").addEventListener("click", () => {
  running?.abort();
  messages = [];
  pictures = [];
  showPictures();
  $("log").replaceChildren();
  say("");
  $("prompt").focus();
});
$("settings").addEventListener("input", store);
$("key").addEventListener("change", loadProps);
$("reset").addEventListener("click", () => {
  for (const name of SETTINGS) $(name).value = "";
  $("thinking").checked = true;
  store();
});
toggle($("show-settings"), $("settings"));
toggle($("show-monitor"), $("monitor"));
restore();
loadProps();

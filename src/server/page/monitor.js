// The live monitor: reads /slots and /metrics once a second while its panel is open.
import { headers } from "/page/chat.js";

const $ = (id) => document.getElementById(id);
let timer = null;
let last = null;

// Prometheus text as {name: value}, labels dropped (one model, so names are unique where we look).
function parse(text) {
  const all = {};
  for (const line of text.split("\n")) {
    const m = line.match(/^([\w:]+)(?:\{.*\})? (\S+)$/);
    if (m) all[m[1]] = (all[m[1]] ?? 0) + Number(m[2]);
  }
  return all;
}

const bytes = (n) => n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(2)} GiB` : `${(n / 2 ** 20).toFixed(0)} MiB`;
const share = (part, all) => all > 0 ? `${(100 * part / all).toFixed(0)} %` : "–";

function numbers(m, rate) {
  return [
    ["Requests running", m["vllm:num_requests_running"]],
    ["Requests waiting", m["vllm:num_requests_waiting"]],
    ["Decode", `${rate.decode.toFixed(1)} tok/s`],
    ["Prompt", `${rate.prompt.toFixed(0)} tok/s`],
    ["Drafts accepted", share(m["vllm:spec_decode_num_accepted_tokens_total"], m["vllm:spec_decode_num_draft_tokens_total"])],
    ["Prompt tokens held", share(m["vllm:prefix_cache_hits_total"], m["vllm:prefix_cache_queries_total"])],
    ["Slot rows in use", share(m["vllm:kv_cache_usage_perc"], 1)],
    ["States in memory", `${m["strata:cache_ram_states"]} (${bytes(m["strata:cache_ram_bytes"])})`],
    ["Tokens generated", m["vllm:generation_tokens_total"]],
    ["Memory", bytes(m["process_resident_memory_bytes"] ?? 0)],
  ];
}

function draw(m, slots) {
  const now = performance.now() / 1000;
  const read = m["vllm:prompt_tokens_total"] - m["vllm:prefix_cache_hits_total"];
  const rate = { decode: 0, prompt: 0 };
  if (last) {
    const seconds = Math.max(now - last.now, 1e-3);
    rate.decode = Math.max(0, m["vllm:generation_tokens_total"] - last.generated) / seconds;
    rate.prompt = Math.max(0, read - last.read) / seconds;
  }
  last = { now, generated: m["vllm:generation_tokens_total"], read };
  $("numbers").replaceChildren(...numbers(m, rate).flatMap(([name, value]) => {
    const dt = document.createElement("dt");
    const dd = document.createElement("dd");
    dt.textContent = name;
    dd.textContent = String(value);
    return [dt, dd];
  }));
  $("slots").replaceChildren(...slots.map((slot) => {
    const tr = document.createElement("tr");
    const reading = slot.state === "reading" ? `${slot.state} ${slot.read_rows}/${slot.prompt_rows}` : slot.state;
    for (const text of [slot.id, reading, `${slot.held_rows}/${slot.n_ctx}`, slot.n_decoded]) {
      const td = document.createElement("td");
      td.textContent = String(text);
      tr.append(td);
    }
    return tr;
  }));
}

async function tick() {
  try {
    const [metrics, slots] = await Promise.all(["/metrics", "/slots"].map((path) => fetch(path, { headers: headers() })));
    if (metrics.ok && slots.ok) draw(parse(await metrics.text()), await slots.json());
  } catch { /* the next tick tries again */ }
  if (!$("monitor").hidden) timer = setTimeout(tick, 1000);
}

$("monitor").addEventListener("toggle", () => {
  clearTimeout(timer);
  last = null;
  if (!$("monitor").hidden) tick();
});

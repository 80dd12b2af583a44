// What is shown of a state of the feed. Each function replaces the contents of one section.

import { $, age, clock, element, fillTable, number, rate, seconds, setText, share } from "./dom.js";

const sum = (items, value) => items.reduce((total, item) => total + (value(item) ?? 0), 0);

export const used = (worker) =>
  worker.kv_total_blocks ? Math.min(1, worker.kv_used_blocks / worker.kv_total_blocks) : null;

export function showAlarms(state) {
  const found = state.alarms.map((alarm) => element("li", { className: alarm.level }, `${alarm.level}: ${alarm.text}`));
  const shown = found.length ? found : [element("li", {}, "none")];
  const text = shown.map((item) => item.textContent).join();
  if ($("alarms").dataset.text !== text) {
    $("alarms").dataset.text = text;
    $("alarms").replaceChildren(...shown);
  }
}

export function showTiles(state) {
  const minute = state.models.map((model) => model.last_minute).filter(Boolean);
  const worst = (key, name) => {
    const known = minute.map((counts) => counts[key][name]).filter((value) => value !== null);
    return known.length ? Math.max(...known) : null;
  };
  const prompt = sum(minute, (counts) => counts.prompt_tokens);
  const cached = sum(minute, (counts) => (counts.hit_rate ?? 0) * counts.prompt_tokens);
  const serving = state.workers.filter((worker) => worker.status === "free").length;
  const tiles = {
    "Requests per second": rate(sum(minute, (counts) => counts.requests_per_second)),
    "Output tokens per second": rate(sum(minute, (counts) => counts.output_tokens_per_second)),
    "First token, p50": seconds(worst("time_to_first_token", "p50")),
    "First token, p99": seconds(worst("time_to_first_token", "p99")),
    "Between tokens, p99": seconds(worst("inter_token_latency", "p99")),
    "Waiting for admission": number(sum(state.models, (model) => model.waiting)),
    "Being answered": number(sum(state.models, (model) => model.prefilling + model.answering)),
    Refused: number(sum(minute, (counts) => counts.refused)),
    Failed: number(sum(minute, (counts) => counts.failed)),
    Moved: number(sum(minute, (counts) => counts.moved)),
    "Prompt from the cache": prompt ? share(cached / prompt) : "–",
    "Workers free": `${serving} of ${state.workers.length}`,
  };
  const list = $("tiles");
  if (!list.children.length) {
    for (const name of Object.keys(tiles)) list.append(element("div", {}, element("dt", {}, name), element("dd")));
  }
  Object.entries(tiles).forEach(([name, text], index) => {
    const shown = list.children[index].lastChild;
    setText(shown, text);
    shown.classList.toggle("error", name === "Workers free" && !serving);
  });
}

export function showModels(state) {
  const minute = (value) => (model) => (model.last_minute ? value(model.last_minute) : "–");
  fillTable($("models"), [
    ["Model", (model) => model.name, ""],
    ["Workers", (model) => Object.entries(model.workers).map(([role, count]) => `${count} ${role}`).join(", ") || "none", ""],
    ["Waiting", (model) => number(model.waiting), "number"],
    ["Prefilling", (model) => number(model.prefilling), "number"],
    ["Answering", (model) => number(model.answering), "number"],
    ["Requests/s", minute((counts) => rate(counts.requests_per_second)), "number"],
    ["Failed", minute((counts) => number(counts.failed)), "number"],
    ["Refused", minute((counts) => number(counts.refused)), "number"],
    ["TTFT p50", minute((counts) => seconds(counts.time_to_first_token.p50)), "number"],
    ["TTFT p99", minute((counts) => seconds(counts.time_to_first_token.p99)), "number"],
    ["ITL p99", minute((counts) => seconds(counts.inter_token_latency.p99)), "number"],
    ["Cached", minute((counts) => share(counts.hit_rate)), "number"],
  ], state.models, "No models yet");
}

export function showTenants(state) {
  const minute = (key) => (tenant) => number(tenant.last_minute?.[key] ?? 0);
  const whole = (key) => (tenant) => number(tenant.last_15_minutes[key]);
  fillTable($("tenants"), [
    ["Tenant", (tenant) => tenant.name, ""],
    ["Requests, 1 min", minute("requests"), "number"],
    ["Requests, 15 min", whole("requests"), "number"],
    ["Refused, 15 min", whole("refused"), "number"],
    ["Failed, 15 min", whole("failed"), "number"],
    ["Prompt tokens, 15 min", whole("prompt_tokens"), "number"],
    ["Output tokens, 15 min", whole("output_tokens"), "number"],
  ], state.tenants, "No requests in the last 15 minutes");
}

export function showFrontends(state) {
  fillTable($("frontends"), [
    ["Frontend", (one) => one.id, ""],
    ["Host", (one) => one.host || "–", ""],
    ["Pid", (one) => String(one.pid ?? "–"), "number"],
    ["Version", (one) => one.version || "–", ""],
    ["Counted", (one) => (one.missing ? element("span", { className: "error" }, `no: ${one.missing}`) : "yes"), "wrap"],
  ], state.frontends, "None");
}

// The name of a worker, with its id as a tooltip; the id of one whose name is not known.
function named(one) {
  return element("span", { title: one.worker ?? "" }, one.worker_name ?? one.worker ?? "–");
}

// Where there is room for both.
const workerOf = (event) => `worker ${event.worker_name ? `${event.worker_name} (${event.worker})` : event.worker ?? "–"}`;

export function showRecent(state, open) {
  // A row that is being read or has the focus would be lost.
  if ($("recent").contains(document.activeElement)) return;
  fillTable($("recent"), [
    ["Request", (line) => element("button", { type: "button", onclick: () => open(line.id), title: line.id }, line.id.slice(0, 12)), ""],
    ["Received", (line) => clock(line.received), ""],
    ["Model", (line) => line.model, ""],
    ["Tenant", (line) => line.tenant, ""],
    ["Ended", (line) => (line.status === "success" ? line.finish_reason || "success" : element("span", { className: "error" }, line.error_type || "error")), ""],
    ["Waited", (line) => seconds(line.waited), "number"],
    ["First token", (line) => seconds(line.time_to_first_token), "number"],
    ["In all", (line) => seconds(line.duration), "number"],
    ["Prompt", (line) => number(line.prompt_tokens), "number"],
    ["Cached", (line) => number(line.cached_tokens), "number"],
    ["Output", (line) => number(line.output_tokens), "number"],
    ["Worker", named, ""],
  ], state.recent, "No requests have ended yet");
}

export function showBalance(state) {
  const pools = new Map();
  for (const worker of state.workers) {
    const key = `${worker.model}, ${worker.role}`;
    if (!pools.has(key)) pools.set(key, []);
    pools.get(key).push(worker.served);
  }
  const told = [];
  for (const [name, served] of pools) {
    const mean = sum(served, (count) => count) / served.length;
    // Fewer requests than workers say nothing of the routing.
    if (served.length > 1 && mean >= 1) told.push(`${name}: the busiest worker had ${(Math.max(...served) / mean).toFixed(2)} × the mean`);
  }
  const first = told.slice(0, 6).join("; ");
  setText($("balance"), told.length ? `Balance of requests in 15 minutes. ${first}${told.length > 6 ? `; and ${told.length - 6} more` : ""}.` : "");
}

const DENSE = 200;
const ORDERS = {
  name: (one, other) => one.model.localeCompare(other.model) || one.name.localeCompare(other.name, undefined, { numeric: true }),
  kv: (one, other) => (used(other) ?? -1) - (used(one) ?? -1),
  requests: (one, other) => other.requests - one.requests,
  status: (one, other) => Number(one.status === "free") - Number(other.status === "free"),
};

// One button for each worker, made once. Of all buttons one can be reached with Tab; arrow keys reach the others.
export class Fleet {
  constructor(open) {
    this.open = open;
    this.cells = new Map();
    this.box = $("fleet");
    this.box.addEventListener("keydown", (event) => this.move(event));
    this.box.addEventListener("focusin", (event) => this.current(event.target));
  }

  show(state) {
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (worker) => {
      const text = `${worker.name} ${worker.id} ${worker.model} ${worker.role} ${worker.state} ${worker.status} ${worker.host}`.toLowerCase();
      return words.every((word) => text.includes(word));
    };
    const order = ORDERS[$("order").value];
    const shown = state.workers.filter(matches).sort((one, other) => order(one, other) || ORDERS.name(one, other));
    this.box.classList.toggle("dense", shown.length > DENSE);
    const keys = new Set();
    let place = null;
    for (const worker of shown) {
      const key = `${worker.model}/${worker.role}/${worker.id}`;
      keys.add(key);
      let cell = this.cells.get(key);
      if (!cell) this.cells.set(key, (cell = this.make()));
      this.update(cell, worker);
      // Moves only what is out of place: a focus stays.
      const wanted = place ? place.nextSibling : this.box.firstChild;
      if (wanted !== cell.button) this.box.insertBefore(cell.button, wanted);
      place = cell.button;
    }
    for (const [key, cell] of this.cells) {
      if (!keys.has(key)) {
        cell.button.remove();
        this.cells.delete(key);
      }
    }
    if (!this.box.querySelector("[tabindex='0']")) this.box.firstChild?.setAttribute("tabindex", "0");
    const out = shown.filter((worker) => worker.status !== "free").length;
    setText($("fleet-count"), `${shown.length} of ${state.workers.length} workers, ${out} of them get no requests`);
  }

  make() {
    const cell = { worker: null, label: "", fill: element("i"), name: element("span"), load: element("span") };
    cell.button = element("button", { type: "button", tabIndex: -1, onclick: () => this.open(cell.worker) }, cell.fill, cell.name, cell.load);
    return cell;
  }

  update(cell, worker) {
    cell.worker = worker;
    const kv = used(worker);
    const load = `${worker.requests} req, KV ${share(kv)}`;
    const label = `${worker.name}, ${worker.model}, ${worker.role}, ${worker.status}, ${worker.requests} requests, KV ${share(kv)}`;
    if (cell.label === label) return;
    cell.label = label;
    cell.button.setAttribute("aria-label", label);
    cell.button.title = label;
    cell.button.className = worker.status === "free" ? "" : worker.state === "serving" ? "busy" : "out";
    cell.fill.style.height = `${Math.round((kv ?? 0) * 100)}%`;
    setText(cell.name, worker.name);
    setText(cell.load, worker.status === "free" ? load : `${worker.status}, ${load}`);
  }

  current(button) {
    for (const other of this.box.querySelectorAll("[tabindex='0']")) other.setAttribute("tabindex", "-1");
    button.setAttribute("tabindex", "0");
  }

  move(event) {
    const all = [...this.box.children];
    const at = all.indexOf(document.activeElement);
    const columns = getComputedStyle(this.box).gridTemplateColumns.split(" ").length;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || to === undefined || !all[to]) return;
    event.preventDefault();
    all[to].focus();
  }
}

export function workerFacts(worker, now) {
  const facts = {
    Id: worker.id, Model: worker.model, Role: worker.role, State: worker.state,
    Status: worker.status === "free" ? "free: it gets requests" : `${worker.status}: it gets no requests`,
    "Running requests": number(worker.requests),
    "KV blocks": `${number(worker.kv_used_blocks)} of ${number(worker.kv_total_blocks)} (${share(used(worker))})`,
    "Prompt tokens to compute": number(worker.prefill_tokens),
    "Requests in 15 minutes": number(worker.served), "Prompt tokens from its cache": share(worker.hit_rate),
    Host: worker.host || "–", Pid: String(worker.pid ?? "–"), Version: worker.version ?? "–", "Runs for": age(worker.started, now),
  };
  return element("dl", {}, ...Object.entries(facts).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
}

const WORDS = {
  received: () => "received",
  admitted: (event) => `admitted after ${seconds(event.waited)}, ${event.prompt_tokens} prompt tokens`,
  refused: (event) => `refused at ${event.stage}${event.plugin ? ` by ${event.plugin}` : ""}: ${event.error}: ${event.reason}`,
  routed: (event) => `routed by ${event.router} to ${event.role} ${workerOf(event)}, which holds ${event.overlap} blocks of the prompt`,
  attempted: (event) => `${workerOf(event)} ${event.error ? `did not accept: ${event.error}: ${event.reason}` : "accepted"}`,
  first_token: () => "first token",
  moved: (event) => `${workerOf(event)} failed after ${event.tokens} tokens, another is sought: ${event.error}: ${event.reason}`,
  finished: (event) => `${event.status}: ${event.error_type || event.finish_reason || "–"}, HTTP ${event.http_status}; ${event.prompt_tokens} prompt tokens (${event.cached_tokens ?? "?"} cached), ${event.output_tokens} output tokens`,
};

function candidates(event) {
  const table = element("table");
  fillTable(table, [
    ["Worker", (one) => element("span", {}, named(one), one.worker === event.worker && one.dp_rank === event.dp_rank ? " (chosen)" : ""), ""],
    ["Rank", (one) => String(one.dp_rank), "number"],
    ["Overlap", (one) => number(one.overlap), "number"],
    ["Prefill", (one) => number(one.prefill_tokens), "number"],
    ["Blocks", (one) => number(one.blocks), "number"],
    ["Cost", (one) => one.cost.toFixed(2), "number"],
  ], event.candidates, "");
  return table;
}

export function timeline(answer) {
  const { request, frontend } = answer;
  const facts = {
    Model: request.model, Endpoint: `${request.endpoint}, ${request.request_type}`, Tenant: request.tenant, Key: request.key_id || "–",
    Frontend: `${frontend.id} on ${frontend.host || "–"}, pid ${frontend.pid}`, Trace: request.trace_id,
  };
  const items = request.events.map((event) => {
    const item = element("li", { className: event.error || event.status === "error" ? "error" : "" },
      element("span", { className: "at" }, `${event.at.toFixed(3)} s`), (WORDS[event.event] ?? (() => event.event))(event));
    if (event.candidates?.length) item.append(candidates(event));
    return item;
  });
  if (!request.ended) items.push(element("li", {}, "it has not ended yet"));
  return element("div", {},
    element("dl", {}, ...Object.entries(facts).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, String(text))])),
    stages(request.events), element("ol", { className: "timeline" }, ...items));
}

// How long it waited, was prefilled and was answered, one beside the other.
function stages(events) {
  const at = (name) => events.find((event) => event.event === name)?.at;
  const end = events.at(-1).at || 1e-9;
  const admitted = at("admitted") ?? end;
  const first = at("first_token") ?? end;
  const parts = [["waiting", admitted, "--warn"], ["prefill", first - admitted, "--series-2"], ["answer", end - first, "--good"]];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "bar");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", parts.map(([name, time]) => `${name} ${seconds(Math.max(0, time))}`).join(", "));
  let left = 0;
  for (const [, time, fill] of parts) {
    const width = Math.max(0, time) / end * 100;
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [key, value] of Object.entries({ x: `${left}%`, width: `${width}%`, height: "100%" })) rect.setAttribute(key, value);
    rect.style.fill = `var(${fill})`;
    svg.append(rect);
    left += width;
  }
  return svg;
}

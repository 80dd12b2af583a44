// The page: logs in, follows the feed, and opens what is asked for.

import { Refused, act, actOnWorker, ask, mayAct, reload, take, toast } from "./acts.js";
import { Charts } from "./charts.js";
import { $, clock, element, fillTable, setText } from "./dom.js";
import { Fleet, showAlarms, showBalance, showFrontends, showModels, showRecent, showTenants, showTiles, timeline, workerFacts } from "./views.js";

let state = null;
let source = null;
let opened = null;
const fleet = new Fleet(openWorker);
const charts = new Charts();

function show(next) {
  state = next;
  const missing = state.frontends.filter((one) => one.missing).length;
  connection(`live, ${clock(state.time)}, ${state.frontends.length - missing} of ${state.frontends.length} frontends`, false);
  showAlarms(state);
  showTiles(state);
  showModels(state);
  showTenants(state);
  showFrontends(state);
  showRecent(state, openRequest);
  showBalance(state);
  fleet.show(state);
  charts.show(state.history, state.time, state.since);
  showThresholdModels();
  if (opened) refreshWorker();
}

function connection(text, lost) {
  setText($("connection"), text);
  $("connection").classList.toggle("lost", lost);
}

function follow() {
  source?.close();
  source = new EventSource("/admin/feed");
  source.addEventListener("state", (event) => show(JSON.parse(event.data)));
  source.onerror = async () => {
    connection("no connection to the frontend: trying again", true);
    if (source.readyState !== EventSource.CLOSED) return;
    try {
      // It says why there is no feed.
      await ask("GET", "/admin/state");
      setTimeout(follow, 2000);
    } catch (error) {
      if (error instanceof Refused && error.status === 401) begin();
      else if (error instanceof Refused && error.status === 404) connection("there is no feed: add `- {use: feed}` to extensions", true);
      else setTimeout(follow, 2000);
    }
  };
}

// A worker that is shown goes on being shown as it is now.
function openWorker(worker) {
  opened = worker;
  setText($("detail-title"), `Worker ${worker.name}`);
  const actions = mayAct() ? (worker.state === "serving" ? ["cordon", "drain"] : ["uncordon", "drain"]) : [];
  $("detail-acts").replaceChildren(...actions.map((action) => element("button", {
    type: "button", className: "act", onclick: async () => {
      const told = await actOnWorker(action, opened);
      if (told) $("detail").close();
    },
  }, action[0].toUpperCase() + action.slice(1))));
  refreshWorker();
  $("detail").showModal();
}

function refreshWorker() {
  const now = state.workers.find((one) => one.id === opened.id && one.model === opened.model && one.role === opened.role);
  if (now) opened = now;
  $("detail-body").replaceChildren(now ? workerFacts(now, state.time) : "It has left.");
}

async function openRequest(id) {
  try {
    const found = await ask("GET", `/admin/requests/${encodeURIComponent(id)}`);
    opened = null;
    setText($("detail-title"), `Request ${found.request.id}`);
    $("detail-acts").replaceChildren();
    $("detail-body").replaceChildren(timeline(found));
    $("detail").showModal();
  } catch (error) {
    toast(error.message);
  }
}

function showThresholdModels() {
  const select = $("threshold-model");
  const names = state.models.map((model) => model.name);
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  if (names.includes(chosen)) select.value = chosen;
  else showThresholds();
}

const THRESHOLDS = ["active_decode_blocks_threshold", "active_prefill_tokens_threshold"];
let inForce = {};

async function showThresholds() {
  const model = $("threshold-model").value;
  if (!model || !mayAct()) return;
  try {
    const told = await ask("GET", "/busy_threshold");
    if (model === $("threshold-model").value) fillThresholds(model, told.thresholds.find((one) => one.model === model) ?? {});
  } catch (error) {
    setText($("thresholds-now"), error.message);
  }
}

function fillThresholds(model, values) {
  inForce = values;
  for (const name of THRESHOLDS) $(name).value = values[name] ?? "";
  const set = Object.entries(values).filter(([name, value]) => name !== "model" && value !== null);
  const words = set.map(([name, value]) => `${name} = ${value}`).join(", ") || "none";
  setText($("thresholds-now"), `In force for ${model}: ${words}. A field that is left empty changes nothing.`);
}

async function setThresholds(event) {
  event.preventDefault();
  const model = $("threshold-model").value;
  // What is in force may be from the config file, and is not set a second time.
  const changed = THRESHOLDS.filter((name) => $(name).value !== "" && $(name).value !== String(inForce[name] ?? ""));
  const wanted = Object.fromEntries(changed.map((name) => [name, Number($(name).value)]));
  if (!changed.length) {
    toast("Change at least one threshold");
    return;
  }
  const words = Object.entries(wanted).map(([name, value]) => `${name} = ${value}`).join(", ");
  const told = await act({
    title: `Set thresholds of ${model}?`, text: `For all frontends: ${words}. Workers above them get no new requests.`, word: "Set",
    method: "POST", path: "/busy_threshold", body: { model, ...wanted }, done: () => `Thresholds of ${model} are set`,
  });
  if (told) fillThresholds(model, told);
}

async function showSettings() {
  if (!$("settings-details").open) return;
  try {
    const told = await ask("GET", "/dashboard/settings");
    fillTable($("settings"), [
      ["Key", (row) => row.key, ""],
      ["Value", (row) => (typeof row.value === "string" ? row.value : JSON.stringify(row.value)), "wrap"],
      ["From", (row) => row.origin, ""],
    ], told.settings, "None");
  } catch (error) {
    toast(error.message);
  }
}

function entered(about) {
  take(about);
  $("login").hidden = true;
  $("main").hidden = false;
  $("logout").hidden = !about.asks_for_token;
  $("operate").hidden = !mayAct();
  setText($("whose"), `logged in as ${about.role}`);
  showThresholds();
  follow();
}

async function begin() {
  source?.close();
  const about = await ask("GET", "/dashboard/session");
  if (about.role) entered(about);
  else if (!about.asks_for_token) entered(await ask("POST", "/dashboard/login", {}));
  else {
    take(about);
    connection("not logged in", false);
    setText($("whose"), "");
    $("main").hidden = $("logout").hidden = true;
    $("login").hidden = false;
    $("token").focus();
  }
}

const THEMES = ["system", "light", "dark"];

function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
  setText($("theme"), `Theme: ${name}`);
  charts.rebuild();
}

$("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setText($("login-error"), "");
  try {
    entered(await ask("POST", "/dashboard/login", { token: $("token").value }));
    $("token").value = "";
  } catch (error) {
    setText($("login-error"), error.message);
  }
});
$("logout").addEventListener("click", async () => { await ask("POST", "/dashboard/logout"); await begin(); });
$("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(localStorage.getItem("theme") ?? "system") + 1) % THEMES.length]));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.rebuild());
$("detail-close").addEventListener("click", () => $("detail").close());
$("detail").addEventListener("close", () => { opened = null; });
$("filter").addEventListener("input", () => state && fleet.show(state));
$("order").addEventListener("change", () => state && fleet.show(state));
$("fleet-filter").addEventListener("submit", (event) => event.preventDefault());
$("find-form").addEventListener("submit", (event) => { event.preventDefault(); if ($("find").value.trim()) openRequest($("find").value.trim()); });
$("thresholds").addEventListener("submit", setThresholds);
$("threshold-model").addEventListener("change", showThresholds);
$("reload").addEventListener("click", reload);
$("settings-details").addEventListener("toggle", showSettings);

theme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "system");
begin().catch((error) => connection(error.message, true));

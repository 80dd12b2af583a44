// Requests to the frontend: what is shown, and what is changed, which is asked for twice.

import { $, setText } from "./dom.js";

let session = { role: null, csrf: "" };
export const mayAct = () => session.role === "operator";
export function take(about) { session = about; }

export async function ask(method, path, body) {
  const headers = method === "GET" ? {} : { "x-csrf-token": session.csrf || "" };
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  let told = null;
  try { told = await answer.json(); } catch { /* the status tells */ }
  if (!answer.ok) throw new Refused(answer.status, told?.error?.message ?? told?.error ?? `the frontend answered ${answer.status}`);
  return told;
}

export class Refused extends Error {
  constructor(status, message) {
    super(String(message));
    this.status = status;
  }
}

let hiding;
export function toast(text) {
  setText($("toast"), text);
  clearTimeout(hiding);
  hiding = setTimeout(() => setText($("toast"), ""), 8000);
}

function confirmed(title, text, word) {
  const dialog = $("confirm");
  setText($("confirm-title"), title);
  setText($("confirm-text"), text);
  setText($("confirm-yes"), word);
  return new Promise((resolve) => {
    let chosen = false;
    $("confirm-yes").onclick = () => { chosen = true; dialog.close(); };
    $("confirm-no").onclick = () => dialog.close();
    dialog.onclose = () => resolve(chosen);
    dialog.showModal();
    $("confirm-no").focus();
  });
}

// Asks the operator first. Returns what the frontend answers; null if the operator or the frontend refuses.
export async function act({ title, text, word, method, path, body, done }) {
  if (!await confirmed(title, text, word)) return null;
  try {
    const told = await ask(method, path, body);
    toast(done(told));
    return told;
  } catch (error) {
    toast(`Refused: ${error.message}`);
    return null;
  }
}

const EFFECTS = {
  cordon: ["Cordon", "gets no new requests and finishes what it has, until it is uncordoned"],
  drain: ["Drain", "gets no new requests and finishes what it has, since it is to be stopped"],
  uncordon: ["Uncordon", "gets requests again"],
};

export function actOnWorker(action, worker) {
  const [word, effect] = EFFECTS[action];
  return act({
    title: `${word} ${worker.name}?`, text: `Worker ${worker.id} of ${worker.model} ${effect}.`, word,
    method: "POST", path: `/admin/workers/${encodeURIComponent(worker.id)}/${action}`,
    done: (told) => `${worker.name} is ${told.state}`,
  });
}

export async function reload() {
  let report;
  try {
    report = await ask("POST", "/admin/reload?dry_run=1");
  } catch (error) {
    toast(`Refused: ${error.message}`);
    return;
  }
  const changes = (report.changes ?? []).map((change) => change.key);
  if (!changes.length) {
    toast("The settings files say what is in force: nothing would change");
    return;
  }
  await act({
    title: "Reload settings?", text: `These change for all processes: ${changes.join(", ")}.`, word: "Reload",
    method: "POST", path: "/admin/reload", done: (told) => `Settings: ${told.status}`,
  });
}

// Elements, and the words for numbers. Text is set as text only: nothing that a server sends becomes markup.

export const $ = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Changes the text only if it is another one, so that screen readers and selections are left alone.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Columns are [title, row => text or element, "number" or ""].
export function fillTable(table, columns, rows, empty) {
  if (!table.tHead) {
    const cells = columns.map(([title, , kind]) => element("th", { scope: "col", className: kind || "" }, title));
    table.append(element("thead", {}, element("tr", {}, ...cells)), element("tbody"));
  }
  const body = table.tBodies[0];
  const made = rows.map((row) => {
    const cells = columns.map(([, cell, kind]) => element("td", { className: kind || "" }, cell(row)));
    return element("tr", {}, ...cells);
  });
  if (!made.length) made.push(element("tr", {}, element("td", { colSpan: columns.length }, empty)));
  body.replaceChildren(...made);
}

export const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));
export const rate = (value) => (value >= 100 ? Math.round(value).toLocaleString("en-US") : value.toFixed(1));
export const share = (value) => (value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`);

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 120 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

export function age(since, now) {
  if (!since) return "–";
  const passed = Math.max(0, now - since);
  if (passed < 120) return `${Math.round(passed)} s`;
  if (passed < 7200) return `${Math.round(passed / 60)} min`;
  return passed < 172800 ? `${Math.round(passed / 3600)} h` : `${Math.round(passed / 86400)} d`;
}

export const clock = (time) => new Date(time * 1000).toLocaleTimeString();

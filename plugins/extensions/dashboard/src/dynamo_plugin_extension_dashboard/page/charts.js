// The charts of the last 15 minutes.

import { $, element } from "./dom.js";

// A title, the series, and what a slot without requests counts as, once counting has begun.
const CHARTS = [
  ["Requests per second", [["answered", (row) => (row.requests - row.failed) / SLOT], ["refused", (row) => row.refused / SLOT], ["failed", (row) => row.failed / SLOT]], 0],
  ["Time to first token, ms", percentiles("time_to_first_token", ["p50", "p90", "p99"]), null],
  ["Time between tokens, ms", percentiles("inter_token_latency", ["p50", "p90", "p99"]), null],
  ["Output tokens per second", [["tokens", (row) => row.output_tokens_per_second]], 0],
  ["Prompt tokens from the cache, %", [["cached", (row) => (row.hit_rate === null ? null : row.hit_rate * 100)]], null],
];
const HEIGHT = 180;
const SLOT = 10;
const SLOTS = 90;

function percentiles(key, names) {
  return names.map((name) => [name, (row) => (row[key][name] === null ? null : row[key][name] * 1000)]);
}

// The values that no line reaches, since those before and after them are missing.
function alone(plot, index) {
  const values = plot.data[index];
  const missing = (at) => values[at] === null || values[at] === undefined;
  return values.flatMap((_, at) => (!missing(at) && missing(at - 1) && missing(at + 1) ? [at] : []));
}

// What `light-dark()` comes to now.
function color(name) {
  const probe = element("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export class Charts {
  constructor() {
    this.plots = [];
    this.rows = [];
    new ResizeObserver(() => this.resize()).observe($("charts"));
  }

  // `since` is when counting began; null: no frontend answers; undefined: it is not known.
  show(rows, now, since) {
    Object.assign(this, { rows, now, since });
    if (!this.plots.length) this.build();
    const known = new Map(rows.map((row) => [row.time, row]));
    const last = Math.floor(now / SLOT) * SLOT;
    const counted = (time) => since === undefined || (since !== null && time + SLOT > since);
    const times = Array.from({ length: SLOTS }, (_, index) => last - (SLOTS - 1 - index) * SLOT);
    CHARTS.forEach(([title, series, idle], index) => {
      const data = series.map(([, value]) => times.map((time) => (known.has(time) ? value(known.get(time)) : counted(time) ? idle : null)));
      this.plots[index].plot.setData([times, ...data]);
      this.describe(title, series, data, this.plots[index].figure);
    });
  }

  // Colors are those of the theme, so that another theme needs other plots.
  build() {
    for (const { plot } of this.plots) plot.destroy();
    $("charts").replaceChildren();
    const [soft, line] = [color("--soft"), color("--line")];
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    this.plots = CHARTS.map(([title, series]) => {
      const figure = element("figure", { role: "img" }, element("figcaption", {}, title));
      $("charts").append(figure);
      const lines = series.map(([label], index) => {
        const stroke = color(`--series-${index + 1}`);
        return {
          label, stroke, width: 2, dash: index ? [6, 2 * index] : [], spanGaps: false,
          points: { show: true, size: 6, fill: stroke, filter: alone },
          value: (_, value) => (value === null || value === undefined ? "–" : value.toFixed(1)),
        };
      });
      const plot = new window.uPlot({
        width: Math.max(200, figure.clientWidth), height: HEIGHT, cursor: { drag: { x: false, y: false } },
        scales: { x: { range: () => [this.now - SLOTS * SLOT, this.now] }, y: { range: (_, low, high) => [0, Math.max(high || 0, 0.1) * 1.05] } },
        axes: [axis, { ...axis, size: 60 }], series: [{ label: "time" }, ...lines],
      }, [[], ...series.map(() => [])], figure);
      return { plot, figure };
    });
  }

  rebuild() {
    if (this.plots.length) {
      this.build();
      this.show(this.rows, this.now, this.since);
    }
  }

  resize() {
    for (const { plot, figure } of this.plots) plot.setSize({ width: Math.max(200, figure.clientWidth), height: HEIGHT });
  }

  // For those who do not see it.
  describe(title, series, data, figure) {
    const last = series.map(([label], index) => {
      const value = data[index].at(-1);
      return `${label} ${value === null || value === undefined ? "none" : value.toFixed(1)}`;
    });
    figure.setAttribute("aria-label", `${title}. Now: ${last.join(", ")}`);
  }
}

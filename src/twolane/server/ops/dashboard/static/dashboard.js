// Asks the server for its figures twice a second while somebody looks, and shows them.

const POLL_MS = 500;
const ANSWER_MS = 5000; // a server that takes longer is as good as gone
const KEPT = 20000; // launches
const NEWEST = 5; // seconds without the end of a launch that are not shown as such
const SPANS = { now: "5 s", minute: "1 min", quarter: "15 min" };
const KEY = "twolane-key";
const $ = (id) => document.getElementById(id);
const state = { window: "minute", zoom: 10, paused: false, seen: 0, launches: [], data: null };

// ---- numbers as people read them

function seconds(s) {
  if (s == null) return "–";
  if (s >= 1) return `${s.toFixed(s < 10 ? 2 : 1)}\u00a0s`;
  return `${(s * 1e3).toFixed(s < 0.1 ? 1 : 0)}\u00a0ms`;
}
const share = (x) => (x == null ? "–" : `${(x * 100).toFixed(x > 0.995 && x < 1 ? 2 : 1)} %`);
const count = (x) => Math.round(x).toLocaleString("en");
const unitsOf = ({ about }) => `${about.unit}s`;
const rate = (x) => (x < 10 ? x.toFixed(1) : count(x));

// ---- elements

function node(tag, text, className) {
  const element = document.createElement(tag);
  if (text != null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function row(...cells) {
  const line = node("tr");
  line.append(...cells);
  return line;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// ---- what is said in words

// Requests may have bounds of their own.
const hasBound = ({ slo, windows }, name) =>
  slo[name] != null || Object.values(windows).some((w) => w.attainment[name] != null);
const missed = (value, bound) => value != null && bound != null && value > bound;

// A TTFT bound that grows with the prompt says nothing about a quantile over all prompts: there the
// requests that ended tell.
function broken(data, name, window) {
  const figures = data.windows[window];
  if (name === "ttft" && data.slo.ttft != null && data.slo.ttft_per_token)
    return figures.attainment.ttft != null && figures.attainment.ttft < 0.99;
  return missed(figures[name][2], data.slo[name]);
}

function boundText({ slo }, name) {
  const more = name === "ttft" && slo.ttft_per_token;
  return seconds(slo[name]) + (more ? ` + ${seconds(slo.ttft_per_token * 1024)}/1K` : "");
}

function verdict(data) {
  const { slo, windows } = data;
  const bounds = ["ttft", "tbt"].filter((name) => slo[name] != null);
  const over = bounds.filter((name) => broken(data, name, "now"));
  const say = (name) =>
    `P99 ${name.toUpperCase()} ${seconds(windows.now[name][2])}, bound ${boundText(data, name)}`;
  const unavailable = data.about.unavailable;
  const judged = bounds.filter((name) => windows.now[name][2] != null);
  const element = $("verdict");
  element.className = unavailable || over.length ? "missed" : judged.length ? "met" : "";
  if (unavailable) element.textContent = `✕ ${unavailable}`;
  else if (over.length) element.textContent = `▲ SLO breach: ${over.map(say).join("; ")} (last 5 seconds)`;
  else if (!bounds.length)
    element.textContent = "This server has no latency bounds: --slo-ttft-ms and --slo-tbt-ms set them.";
  else if (!judged.length) element.textContent = "No tokens in the last 5 seconds.";
  else element.textContent = `✓ Within the bounds: ${judged.map(say).join("; ")} (last 5 seconds)`;
}

function tile(title, value, below, bad) {
  const element = node("div", null, bad ? "tile missed" : "tile");
  element.append(node("h3", title), node("b", bad ? `▲ ${value}` : value), node("p", below));
  return element;
}

function tiles(data) {
  const { now, minute } = data.windows;
  const latency = (name, window, other) => {
    const title = `${name.toUpperCase()}, P99, ${SPANS[window]}`;
    const below = data.slo[name] == null ? "no bound" : `bound ${boundText(data, name)}`;
    const beside = `${below} · ${SPANS[other]} ${seconds(data.windows[other][name][2])}`;
    return tile(title, seconds(data.windows[window][name][2]), beside, broken(data, name, window));
  };
  const judged = Object.entries(minute.attainment).filter(([, value]) => value != null);
  const attainment = judged.length ? Math.min(...judged.map(([, value]) => value)) : null;
  const per = (w, name) => rate(w.totals[name] / w.seconds);
  const { pages, free, cached } = data.kv;
  $("tiles").replaceChildren(
    latency("ttft", "minute", "now"), // requests may come less often than every 5 s
    latency("tbt", "now", "minute"),
    tile("SLO attainment, 1 min", share(attainment),
      judged.map(([name, value]) => `${name.toUpperCase()} ${share(value)}`).join(" · ") ||
        (["ttft", "tbt", "tpot"].some((n) => hasBound(data, n)) ? "none ended" : "no bounds"),
      attainment != null && attainment < 0.99),
    tile("Output tokens/s", per(now, "output_tokens"), `${per(now, "prompt_tokens")} prompt tokens/s`),
    tile("Waiting", count(data.requests.waiting),
      `${data.requests.prefilling} in prefill · ${data.requests.decoding} in decode`),
    tile("KV cache", share(pages ? (pages - free - cached) / pages : 0),
      `prefix hits ${share(minute.prefix_hits)}`),
  );
}

function figures(data) {
  const { slo, windows } = data;
  const names = Object.keys(SPANS);
  const head = node("thead");
  head.append(row(...["", ...names.map((n) => SPANS[n]), "bound"].map((t) => node("th", t))));
  const body = node("tbody");
  const line = (title, cells, bound, bad = () => false) =>
    body.append(row(node("th", title), ...cells.map((cell, i) =>
      node("td", bad(i) ? `▲ ${cell}` : cell, bad(i) ? "missed" : "")), node("td", bound ?? "")));
  for (const name of ["ttft", "tbt"])
    ["P50", "P90", "P99"].forEach((q, k) => line(`${name.toUpperCase()} ${q}`,
      names.map((n) => seconds(windows[n][name][k])), slo[name] == null ? "" : boundText(data, name),
      (i) => k === 2 && broken(data, name, names[i])));
  if (names.some((n) => windows[n].late[2] != null))
    line("Written late, P99", names.map((n) => seconds(windows[n].late[2])));
  for (const name of ["ttft", "tbt", "tpot"].filter((n) => hasBound(data, n)))
    line(`${name.toUpperCase()} attainment`, names.map((n) => share(windows[n].attainment[name])), "99 %",
      (i) => windows[names[i]].attainment[name] != null && windows[names[i]].attainment[name] < 0.99);
  for (const [name, title] of [["received", "Requests/s"], ["output_tokens", "Output tokens/s"],
    ["prompt_tokens", "Prompt tokens/s"]])
    line(title, names.map((n) => rate(windows[n].totals[name] / windows[n].seconds)));
  for (const [name, title] of [["finished", "Finished"], ["refused", "Refused"], ["aborted", "Broken off"]])
    line(title, names.map((n) => count(windows[n].totals[name])));
  line("Preempted", names.map((n) => count(windows[n].preemptions)));
  line("Prefix hits", names.map((n) => share(windows[n].prefix_hits)));
  $("figures").replaceChildren(head, body);
}

function levels(data) {
  const total = data.about.units;
  $("levels-say").textContent = `share of the time for which a lane worked on that many ${unitsOf(data)}, ` +
    "in the chosen window";
  const lines = data.windows[state.window].lanes.map(([lane, units, part]) => {
    const cell = node("td");
    const bar = cell.appendChild(node("div", null, "stack"));
    const filled = bar.appendChild(node("i", null, lane === "device" ? "hybrid" : lane));
    filled.style.width = `${100 * Math.min(part, 1)}%`;
    return row(node("th", `${lane}, ${units} of ${total} ${unitsOf(data)}`), node("td", share(part)), cell);
  });
  const ranks = data.ranks.map((silence, i) =>
    row(node("th", `rank ${i + 1}`), node("td", `sign of life ${silence.toFixed(1)} s ago`)));
  $("levels").replaceChildren(...(lines.length ? lines : [row(node("td", "idle"))]), ...ranks);
}

function memory(data) {
  const { pages, free, cached } = data.kv;
  const part = (n) => `${pages ? (100 * n) / pages : 0}%`;
  const held = pages - free - cached;
  const [first, second] = $("kv").children;
  first.style.width = part(held);
  second.style.width = part(cached);
  const say = `${count(held)} of ${count(pages)} pages held, ${count(cached)} cached`;
  $("kv-say").textContent = say;
  $("kv").setAttribute("aria-label", say);
  const { bytes, requests, snapshots, hits } = data.states;
  const used = ([n, all], what) =>
    `${what} ${count(n)} of ${count(all)} (${((n * bytes) / 2 ** 30).toFixed(1)} GiB)`;
  $("states").hidden = !bytes;
  $("states").textContent = `States of linear attention: ${used(requests, "requests")}, ` +
    `${used(snapshots, "snapshots")}; ${count(hits)} requests began with a snapshot`;
}

function refusals(data) {
  const lines = [...data.refusals].reverse().map(({ at, reason, message, count: n }) =>
    row(node("td", new Date(at * 1e3).toLocaleTimeString()),
      node("td", n > 1 ? `${reason} ×${n}` : reason), node("td", message)));
  $("refusals").replaceChildren(...(lines.length ? lines : [row(node("td", "none"))]));
}

// ---- charts

const LINES = {
  ttft: [["P50", "ttft50", "prefill"], ["P99", "ttft99", "decode", [6, 3]]],
  tbt: [["P50", "tbt50", "prefill"], ["P99", "tbt99", "decode", [6, 3]]],
  tokens: [["output", "output", "decode"], ["prompt", "prompt", "prefill", [6, 3]]],
  requests: [["waiting", "waiting", "hybrid"], ["prefill", "prefilling", "prefill", [6, 3]],
    ["decode", "decoding", "decode", [2, 3]]],
};
const charts = {};

function axes(size = 56) {
  const common = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 },
    ticks: { stroke: colour("line") } };
  const clock = (u, ticks) => ticks.map((t) => new Date(t * 1e3).toLocaleTimeString("en-GB"));
  return [{ ...common, space: 80, size: 30, values: clock }, { ...common, size }];
}

function lineChart(id, bounded) {
  const series = LINES[id].map(([label, , name, dash]) => ({
    label, stroke: colour(name), width: 2, dash, spanGaps: true,
    points: { show: true, size: 4, fill: colour(name) },
  }));
  if (bounded) series.push({ label: "bound", stroke: colour("text"), width: 1.5, dash: [1, 4],
    points: { show: false } });
  return new uPlot({
    width: $(id).clientWidth, height: 190, axes: axes(),
    legend: { live: false, markers: { dash: (u, i) => (u.series[i].dash ? "dashed" : "solid") } },
    scales: { y: { range: (u, low, high) => [0, (high || 1) * 1.08] } },
    hooks: { draw: [sayEmpty] },
    series: [{}, ...series],
  }, [[], ...series.map(() => [])], $(id));
}

function sayEmpty({ ctx, bbox, data, series }) {
  if (data.some((column, i) => i && series[i].label !== "bound" && column.some((v) => v != null))) return;
  ctx.save();
  ctx.fillStyle = colour("soft");
  ctx.font = `${13 * devicePixelRatio}px system-ui`;
  ctx.textAlign = "center";
  ctx.fillText("nothing in this window", bbox.left + bbox.width / 2, bbox.top + bbox.height / 2);
  ctx.restore();
}

function drawCharts(data) {
  const at = (data.points.at ?? []).map((t) => t + data.epoch);
  for (const [id, lines] of Object.entries(LINES)) {
    const bound = data.slo[id];
    charts[id] ??= lineChart(id, bound != null);
    const scale = id in data.slo ? 1e3 : 1;
    const columns = lines.map(([, column]) =>
      (data.points[column] ?? []).map((v) => (v == null ? null : v * scale)));
    if (bound != null) columns.push(at.map(() => bound * scale));
    charts[id].setData([at, ...columns]);
  }
}

const phaseOf = (launch) =>
  launch.lane === "device" && launch.prompts && launch.decoding ? "hybrid"
    : launch.prompts ? "prefill" : "decode";

// Prefill hangs from the top, decode stands on the bottom: an overlap shows as one.
function drawLaunches(u) {
  const { ctx } = u;
  const units = state.data.about.units;
  const [left, right] = [u.bbox.left, u.bbox.left + u.bbox.width];
  const paint = { prefill: colour("prefill"), decode: colour("decode"), hybrid: colour("hybrid") };
  const edge = colour("card");
  ctx.save();
  ctx.globalAlpha = 0.85;
  for (const launch of state.launches) {
    const x0 = Math.max(u.valToPos(launch.start - state.origin, "x", true), left);
    const x1 = Math.min(u.valToPos(launch.end - state.origin, "x", true), right);
    if (x1 <= left || x0 >= right) continue;
    const phase = phaseOf(launch);
    const top = phase === "prefill" ? units : launch.units;
    const y0 = u.valToPos(top, "y", true);
    const y1 = u.valToPos(top - launch.units, "y", true);
    const width = Math.max(x1 - x0, 1);
    ctx.fillStyle = paint[phase];
    ctx.fillRect(x0, y0, width, y1 - y0);
    if (width > 4) {
      ctx.fillStyle = edge;
      ctx.fillRect(x0 + width - 1, y0, 1, y1 - y0);
    }
  }
  ctx.restore();
}

function readLaunch(u) {
  if (u.cursor.left == null || u.cursor.left < 0) return;
  const at = u.posToVal(u.cursor.left, "x") + state.origin;
  const level = u.posToVal(u.cursor.top, "y");
  const units = state.data.about.units;
  const found = state.launches.filter((l) => l.start <= at && at <= l.end).find((l) =>
    phaseOf(l) === "prefill" ? level >= units - l.units : level <= l.units);
  if (found) $("launch").textContent = describe(found, units);
}

function describe(launch, units) {
  const what = [];
  if (launch.prompts)
    what.push(`layers ${launch.layers[0]} to ${launch.layers[1]} of ${launch.prompts} prompts`);
  if (launch.decoding) what.push(`${launch.steps} steps for ${launch.decoding} requests`);
  const predicted = launch.predicted == null ? "" : ` (predicted ${seconds(launch.predicted)})`;
  return `${launch.lane}: ${what.join(" and ")}, ${count(launch.new)} new tokens over ` +
    `${count(launch.reused)}, on ${launch.units} of ${units} ${unitsOf(state.data)} in ` +
    `${seconds(launch.end - launch.start)}${predicted}. ${launch.reason}`;
}

function timeline() {
  const labels = axes(36);
  labels[0].values = (u, ticks) => ticks.map((t) => `${t.toFixed(t % 1 ? 1 : 0)} s`);
  labels[1].values = (u, ticks) => ticks.map((t) => (t % 1 ? "" : t));
  return new uPlot({
    width: $("timeline").clientWidth, height: 180, axes: labels, legend: { show: false },
    scales: { x: { time: false, range: () => [-state.zoom, 0] },
      y: { range: () => [0, state.data.about.units] } },
    series: [{}, { points: { show: false } }], cursor: { drag: { setScale: false } },
    hooks: { draw: [drawLaunches], setCursor: [readLaunch] },
  }, [[-state.zoom, 0], [null, null]], $("timeline"));
}

function takeLaunches(data) {
  state.seen = data.seen;
  if (state.paused) return;
  state.launches.push(...data.launches);
  const oldest = data.now - 10;
  const keep = state.launches.findIndex((l) => l.end >= oldest);
  state.launches = keep < 0 ? [] : state.launches.slice(keep).slice(-KEPT);
  // A launch is drawn once it has ended: while one runs, the newest that has is at the right edge.
  const newest = Math.max(...state.launches.slice(-100).map((l) => l.end));
  const runs = data.requests.prefilling + data.requests.decoding > 0;
  state.origin = runs && data.now - newest < NEWEST ? newest : data.now;
}

function busy(phases) {
  const from = state.origin - state.zoom;
  return state.launches.filter((l) => phases.includes(phaseOf(l)))
    .reduce((sum, l) => sum + Math.max(0, l.end - Math.max(l.start, from)), 0) / state.zoom;
}

function drawTimeline() {
  charts.timeline ??= timeline();
  charts.timeline.redraw(false, true);
  charts.timeline.setData([[-state.zoom, 0], [null, null]]);
  $("lanes-say").textContent = `${share(busy(["prefill", "hybrid"]))} of the time in prefill, ` +
    `${share(busy(["decode", "hybrid"]))} in decode; height: ${unitsOf(state.data)}`;
}

function rebuild() {
  for (const [name, chart] of Object.entries(charts)) {
    chart.destroy();
    delete charts[name];
  }
  if (state.data) show(state.data);
}

// ---- the loop

function show(data) {
  const { about } = data;
  document.title = `${about.model} · Twolane`;
  $("about").textContent = `${about.model} · ${about.system} on ${about.device} · ` +
    `${unitsOf(data)} for prefill + decode: ` + about.levels.map(([p, d]) => `${p}+${d}`).join(", ");
  for (const part of [verdict, tiles, figures, levels, memory, refusals, drawCharts]) part(data);
  drawTimeline();
}

async function ask() {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const query = new URLSearchParams({ window: state.window, after: state.seen });
  const signal = AbortSignal.timeout(ANSWER_MS);
  const answer = await fetch(`dashboard/data?${query}`, { headers, signal, cache: "no-store" });
  const locked = answer.status === 401;
  if (locked && key) sessionStorage.removeItem(KEY);
  $("key").hidden = !locked;
  document.querySelector("main").hidden = locked;
  if (locked) return "a key is needed";
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  const data = await answer.json();
  state.data = data;
  takeLaunches(data);
  show(data);
  return "live";
}

// What is shown is of the past, and must not look as if all were well.
function lost(error) {
  $("link").textContent = `no connection: ${error.message}`;
  if (!state.data) return;
  const { epoch, now } = state.data;
  const last = new Date((epoch + now) * 1e3).toLocaleTimeString();
  $("verdict").className = "missed";
  $("verdict").textContent = `✕ No connection to the server; the figures are of ${last}.`;
}

async function loop() {
  for (;;) {
    if (!document.hidden) {
      try {
        $("link").textContent = await ask();
      } catch (error) {
        lost(error);
      }
    }
    await new Promise((wake) => setTimeout(wake, POLL_MS));
  }
}

function choose(id, pick) {
  $(id).addEventListener("click", (event) => {
    if (!event.target.value) return;
    for (const button of $(id).children)
      button.setAttribute("aria-pressed", button === event.target);
    pick(event.target.value);
    if (state.data) drawTimeline();
  });
}

choose("window", (value) => { state.window = value; });
choose("zoom", (value) => { state.zoom = Number(value); });
$("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  $("pause").setAttribute("aria-pressed", state.paused);
  $("pause").textContent = state.paused ? "Go on" : "Pause";
});
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key-text").value.trim());
  $("key-text").value = "";
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth !== width) rebuild();
  width = document.body.clientWidth;
}).observe(document.body);
loop();

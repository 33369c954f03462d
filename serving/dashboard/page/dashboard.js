// Asks the server for numbers once a second, for the tree less often, and puts both on the page.

const KEEP = 900;
const TIERS = ["device", "host", "disk"];
const NAMES = { device: "Device", host: "Host memory", disk: "Disk" };

const charts = [
  new Chart("output-chart", [{ name: "output", field: "output", colour: "one" }]),
  new Chart("prompt-chart", [
    { name: "cached", field: "cached", colour: "one" },
    { name: "computed", field: "computed", colour: "two" },
  ], { stacked: true }),
  new Chart("ttft-chart", [
    { name: "median", field: "ttft_p50", colour: "one" },
    { name: "95 %", field: "ttft_p95", colour: "two" },
  ], { format: time }),
  new Chart("request-chart", [
    { name: "running", field: "running", colour: "one" },
    { name: "waiting", field: "waiting", colour: "two" },
  ]),
];
const picture = new TreePicture();
let points = [];
let number = 0;
let before = null;

const plural = (many, word) => `${count(many)} ${word}${many === 1 ? "" : "s"}`;

function mean(rows, field) {
  const values = rows.map((row) => row[field]).filter((value) => value != null);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function showHistory(history, seconds) {
  // A server that was started anew counts from 0 again.
  if (history.number < number) points = [];
  number = history.number;
  const rows = history.points.map((values) => {
    const row = Object.fromEntries(history.columns.map((name, at) => [name, values[at]]));
    return { ...row, t: row.seconds };
  });
  points = [...points, ...rows].slice(-KEEP);
  for (const chart of charts) chart.show(points, seconds);
  const recent = points.filter((point) => point.t >= seconds - 10);
  const minute = points.filter((point) => point.t >= seconds - 60);
  byId("output").textContent = recent.length ? count(mean(recent, "output")) : "–";
  const median = mean(minute, "ttft_p50"), slow = mean(minute, "ttft_p95");
  byId("ttft").textContent = median === null ? "–" : time(median);
  byId("ttft95").textContent = slow === null ? "–" : time(slow);
}

function showNumbers(data) {
  byId("model").textContent = data.model;
  byId("state").textContent = data.state;
  byId("state").classList.toggle("good", data.state === "ready");
  byId("age").textContent = `tierax ${data.version}, up ${time(data.seconds)}`;
  byId("logout").hidden = !data.logged_in;
  byId("hit").textContent = data.hit_rate === null ? "–" : percent(data.hit_rate);
  byId("busy").textContent = data.busy === null ? "" : `· device busy ${percent(data.busy)}`;
  const finished = Object.values(data.totals.finished).reduce((sum, value) => sum + value, 0);
  byId("output-note").textContent = `${plural(data.totals.generated, "token")}, ${plural(finished, "request")} ended`;
  const last = data.history.points.at(-1) ?? null;
  if (last !== null) {
    byId("running").textContent = count(last[data.history.columns.indexOf("running")]);
    byId("waiting").textContent = count(last[data.history.columns.indexOf("waiting")]);
  }
}

function shelf(name, tier, queries) {
  if (tier === undefined) {
    return element("div", `shelf ${name} absent`,
      element("div", "top", element("span", "name", NAMES[name]), element("span", "right", "not in use")),
      element("div", "bar"));
  }
  const bar = element("div", "bar");
  const segment = (className, share) => {
    const part = element("i", className);
    part.style.width = `${Math.min(100, share * 100).toFixed(2)}%`;
    bar.append(part);
  };
  const bound = tier.capacity_bytes;
  if (tier.in_use_pages !== null && tier.total_pages) segment("", tier.in_use_pages / tier.total_pages);
  segment("kept", tier.in_use_pages === null
    ? tier.used_bytes / (bound || Math.max(1, tier.used_bytes))
    : (tier.used_pages - tier.in_use_pages) / Math.max(1, tier.total_pages));
  bar.title = tier.in_use_pages === null ? "stored" : "solid: used by running requests; pale: kept for the next ones";
  const room = bound ? `${bytes(tier.used_bytes)} of ${bytes(bound)} (${percent(tier.used_bytes / bound)})` : `${bytes(tier.used_bytes)}, no limit of its own`;
  const hits = queries ? ` (${percent(tier.hit_tokens / queries)} of all prompt tokens)` : "";
  return element("div", `shelf ${name}`,
    element("div", "top", element("span", "name", NAMES[name]), element("span", "right", room)),
    bar,
    element("div", "under",
      element("span", "", element("b", "", count(tier.hit_tokens)), ` tokens hit here${hits}`),
      element("span", "", element("b", "", count(tier.used_pages)), " pages", tier.in_use_pages ? `, ${count(tier.in_use_pages)} in use` : ""),
      element("span", "", element("b", "", count(tier.evicted_pages)), " evicted")));
}

function moves(upper, lower, transfers, rates) {
  const found = [[upper, lower], [lower, upper]].map(([from, to]) => transfers.find((t) => t.from === from && t.to === to));
  const lines = found.filter((t) => t !== undefined).map((t) => {
    const rate = rates[`${t.from}${t.to}`] ?? 0;
    const text = `${t.from === upper ? "↓" : "↑"} ${plural(t.in_flight_pages, "page")} under way, ${bytes(rate)}/s, ${bytes(t.bytes)} so far`;
    return element("span", t.in_flight_pages || rate > 0 ? "live" : "", text);
  });
  return element("div", "moves", ...lines);
}

function showTiers(data) {
  const rates = {};
  if (before !== null) {
    for (const t of data.transfers) {
      const old = before.transfers.find((found) => found.from === t.from && found.to === t.to);
      const elapsed = data.seconds - before.seconds;
      if (old && elapsed > 0) rates[`${t.from}${t.to}`] = Math.max(0, t.bytes - old.bytes) / elapsed;
    }
  }
  const found = Object.fromEntries(data.tiers.map((tier) => [tier.name, tier]));
  const parts = [];
  TIERS.forEach((name, at) => {
    if (at > 0 && found[name] !== undefined) parts.push(moves(TIERS[at - 1], name, data.transfers, rates));
    parts.push(shelf(name, found[name], data.totals.prompt));
  });
  byId("shelves").replaceChildren(...parts);
}

function showRequests(requests) {
  const cached = (tiers) => {
    const parts = TIERS.filter((name) => tiers[name]).map((name) => [element("span", `key ${name}`), `${count(tiers[name])} `]).flat();
    return parts.length ? parts : ["–"];
  };
  byId("requests").replaceChildren(...requests.rows.map((row) => {
    const prompt = row.status === "running" && row.computed < row.prompt ? `${count(row.computed)} / ${count(row.prompt)}` : count(row.prompt);
    return element("tr", "",
      element("td", "", row.id), element("td", "", element("span", `pill ${row.status}`, row.status)),
      element("td", "", prompt), element("td", "", ...cached(row.cached)),
      element("td", "", `${count(row.output)} / ${count(row.most)}`),
      element("td", "", row.ttft === null ? "–" : time(row.ttft)), element("td", "", time(row.seconds)));
  }));
  byId("no-requests").hidden = requests.rows.length > 0;
  byId("hidden-requests").textContent = requests.hidden ? `and ${count(requests.hidden)} more` : "";
}

async function ask(path) {
  const answer = await fetch(`dashboard/${path}`, { signal: AbortSignal.timeout(10000) });
  // The login has run out: the page itself asks for the key.
  if (answer.status === 401 || answer.status === 403) location.reload();
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer.json();
}

// Calls `work` for ever, with a pause between; a hidden page asks for nothing.
async function repeat(work, pause) {
  for (;;) {
    const began = performance.now();
    if (!document.hidden) await work();
    const took = performance.now() - began;
    await new Promise((resume) => setTimeout(resume, Math.max(pause - took, pause / 10, took)));
  }
}

async function refresh() {
  try {
    const data = await ask(`data?since=${number}`);
    showHistory(data.history, data.seconds);
    showNumbers(data);
    showTiers(data);
    showRequests(data.requests);
    before = data;
    byId("banner").hidden = true;
  } catch (error) {
    byId("state").textContent = "no connection";
    byId("state").classList.remove("good");
    byId("banner").textContent = `No numbers from the server: ${error.message}. Trying again.`;
    byId("banner").hidden = false;
  }
}

async function refreshTree() {
  try {
    picture.show(await ask("tree"));
  } catch (error) {
    // Before the engine is ready there is no tree; a lost connection shows in the banner.
    byId("tree-note").textContent = error.message;
  }
}

const themes = ["", "light", "dark"];

function useTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name ? `Theme: ${name}` : "Theme: auto";
  for (const chart of charts) chart.draw();
  picture.redraw();
}

byId("theme").addEventListener("click", () => {
  const next = themes[(themes.indexOf(document.documentElement.dataset.theme ?? "") + 1) % themes.length];
  localStorage.setItem("tierax-theme", next);
  useTheme(next);
});
byId("logout").addEventListener("click", async () => {
  await fetch("dashboard/logout", { method: "POST" });
  location.reload();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => useTheme(document.documentElement.dataset.theme));
window.addEventListener("resize", () => charts.forEach((chart) => chart.draw()));

const remembered = localStorage.getItem("tierax-theme");
useTheme(themes.includes(remembered) ? remembered : "");
repeat(refresh, 1000);
repeat(refreshTree, 2000);

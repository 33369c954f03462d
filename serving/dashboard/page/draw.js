// Small things that all parts of the page use, and the charts.

const byId = (id) => document.getElementById(id);

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function count(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value >= 100 || at === 0 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

function time(seconds) {
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

function percent(share) {
  if (share > 0 && share < 0.001) return "below 0.1 %";
  const whole = share === 0 || share >= 0.9995 || (share >= 0.0995 && share < 0.995);
  return `${(share * 100).toFixed(whole ? 0 : 1)} %`;
}

// Fits a canvas to its place on the screen; what draws on it counts in CSS pixels.
function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

// Text and elements only: nothing that a server says becomes markup.
function element(name, className, ...parts) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...parts.filter((part) => part !== null));
  return made;
}

const tip = byId("tip");

function showTip(event, ...lines) {
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const right = event.clientX + 16 + tip.offsetWidth > innerWidth;
  const low = event.clientY + 16 + tip.offsetHeight > innerHeight;
  tip.style.left = `${Math.max(4, right ? event.clientX - tip.offsetWidth - 12 : event.clientX + 16)}px`;
  tip.style.top = `${Math.max(4, low ? event.clientY - tip.offsetHeight - 12 : event.clientY + 16)}px`;
}

function hideTip() {
  tip.hidden = true;
}

function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

const SPAN = { least: 60, most: 300 };
const MARGIN = { right: 6, top: 6, bottom: 17 };

// A chart of one or two series over the last minutes. `stacked`: the second stands on the first.
class Chart {
  constructor(id, series, { stacked = false, format = count } = {}) {
    this.canvas = byId(id);
    this.series = series;
    this.stacked = stacked;
    this.format = format;
    this.points = [];
    this.end = 0;
    this.span = SPAN.least;
    this.left = 0;
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.at = null;
      hideTip();
      this.draw();
    });
  }

  // Points are rows {t, …}; null where there is no value.
  show(points, end) {
    this.span = Math.min(SPAN.most, Math.max(SPAN.least, end));
    this.points = points.filter((point) => point.t >= end - this.span);
    this.end = end;
    this.draw();
  }

  value(point, index) {
    const own = point[this.series[index].field];
    return this.stacked && index > 0 ? own + this.value(point, index - 1) : own;
  }

  draw() {
    const { pen, width, height } = prepare(this.canvas);
    const { right, top, bottom } = MARGIN;
    const last = this.series.length - 1;
    const values = this.points.flatMap((p) => this.series.map((_, index) => this.value(p, index) ?? 0));
    const most = roundUp(Math.max(...values, this.format === time ? 0.001 : 1));
    pen.font = "11px system-ui, sans-serif";
    const left = this.left = Math.max(...[0.5, 1].map((share) => pen.measureText(this.format(most * share)).width)) + 8;
    const x = (t) => left + ((t - this.end + this.span) / this.span) * (width - left - right);
    const y = (v) => height - bottom - (v / most) * (height - top - bottom);
    pen.fillStyle = colour("faint");
    pen.strokeStyle = colour("grid");
    pen.textBaseline = "middle";
    for (const share of [0, 0.5, 1]) {
      const line = Math.round(y(most * share)) + 0.5;
      pen.beginPath();
      pen.moveTo(left, line);
      pen.lineTo(width - right, line);
      pen.stroke();
      pen.textAlign = "right";
      pen.fillText(share ? this.format(most * share) : "0", left - 6, line);
    }
    pen.textAlign = "left";
    pen.fillText(`${time(Math.round(this.span)).replace(".0", "").replace(" 0 s", "")} ago`, left, height - 6);
    pen.textAlign = "right";
    pen.fillText("now", width - right, height - 6);
    for (let index = last; index >= 0; index -= 1) this.line(pen, index, x, y);
    if (this.at != null) {
      pen.strokeStyle = colour("faint");
      pen.beginPath();
      pen.moveTo(x(this.at), top);
      pen.lineTo(x(this.at), height - bottom);
      pen.stroke();
    }
  }

  line(pen, index, x, y) {
    const runs = [[]];
    for (const point of this.points) {
      const value = this.value(point, index);
      if (value == null) runs.push([]);
      else runs.at(-1).push([x(point.t), y(value)]);
    }
    pen.strokeStyle = pen.fillStyle = colour(this.series[index].colour);
    pen.lineWidth = 1.5;
    pen.lineJoin = "round";
    for (const run of runs.filter((found) => found.length)) {
      pen.beginPath();
      for (const [px, py] of run) pen.lineTo(px, py);
      if (run.length === 1) pen.fillRect(run[0][0] - 1.5, run[0][1] - 1.5, 3, 3);
      pen.stroke();
      pen.lineTo(run.at(-1)[0], y(0));
      pen.lineTo(run[0][0], y(0));
      if (this.stacked) {
        // What lies beneath is another's.
        pen.fillStyle = colour("card");
        pen.fill();
        pen.fillStyle = pen.strokeStyle;
      }
      pen.globalAlpha = this.stacked ? 0.3 : 0.12;
      pen.fill();
      pen.globalAlpha = 1;
    }
    pen.lineWidth = 1;
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - this.left) / (box.width - this.left - MARGIN.right);
    const wanted = this.end - this.span + share * this.span;
    let near = null;
    for (const point of this.points) {
      if (near === null || Math.abs(point.t - wanted) < Math.abs(near.t - wanted)) near = point;
    }
    if (near === null || share < 0 || share > 1) return;
    this.at = near.t;
    this.draw();
    const lines = this.series.map(({ name, field, colour: tone }) => element("div", "",
      element("span", `key ${tone}`), `${name} `, element("b", "", near[field] == null ? "–" : this.format(near[field]))));
    showTip(event, element("div", "", `${time(Math.max(0, this.end - near.t))} ago`), ...lines);
  }
}

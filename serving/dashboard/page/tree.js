// The radix tree as blocks: across are tokens from the start of a prompt, down are branches.

const PARENT = 0, PAGES = 1, DEVICE = 2, HOST = 3, DISK = 4, HEAT = 5, USES = 6, IN_USE = 7, HIDDEN = 8;

class TreePicture {
  constructor() {
    this.canvas = byId("tree");
    this.nodes = [];
    this.pageSize = 1;
    this.depth = this.rows = 1;
    // The part of the picture that is shown, as shares of it.
    this.view = { x: 0, y: 0, w: 1, h: 1 };
    this.pending = false;
    this.listen();
  }

  show(picture) {
    this.pageSize = picture.page_size;
    this.nodes = picture.nodes;
    this.lay();
    byId("no-tree").hidden = this.nodes.length > 0;
    const pages = this.nodes.reduce((sum, node) => sum + node[PAGES], 0);
    const more = picture.truncated ? ", the rest is not shown" : "";
    byId("tree-note").textContent = this.nodes.length
      ? `${count(this.nodes.length)} nodes, ${count(pages * this.pageSize)} tokens${more}` : "";
    this.redraw();
  }

  // Parents come before children: one pass down for depths, one up for heights, one down for places.
  lay() {
    const nodes = this.nodes, many = nodes.length;
    this.start = new Float64Array(many);
    this.top = new Float64Array(many);
    this.height = new Float64Array(many);
    this.depth = 1;
    for (let i = 0; i < many; i += 1) {
      const parent = nodes[i][PARENT];
      this.start[i] = parent < 0 ? 0 : this.start[parent] + nodes[parent][PAGES];
      this.depth = Math.max(this.depth, this.start[i] + nodes[i][PAGES]);
    }
    for (let i = many - 1; i >= 0; i -= 1) {
      this.height[i] = Math.max(1, this.height[i]);
      if (nodes[i][PARENT] >= 0) this.height[nodes[i][PARENT]] += this.height[i];
    }
    const next = new Float64Array(many);
    let below = 0, namespace = 0;
    for (let i = 0; i < many; i += 1) {
      const parent = nodes[i][PARENT];
      if (parent < 0) {
        if (parent !== namespace && namespace !== 0) below += 0.5;
        namespace = parent;
        this.top[i] = below;
        below += this.height[i];
      } else {
        this.top[i] = next[parent];
        next[parent] += this.height[i];
      }
      next[i] = this.top[i];
    }
    // Few branches stay slim.
    this.rows = Math.max(8, below);
  }

  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  scale() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    const { x, y, w, h } = this.view;
    const across = width / (w * this.depth), down = height / (h * this.rows);
    return { across, down, left: x * this.depth * across, above: y * this.rows * down, width, height };
  }

  draw() {
    const { pen, width, height } = prepare(this.canvas);
    const { across, down, left, above } = this.scale();
    const tones = { device: colour("device"), host: colour("host"), disk: colour("disk"), ink: colour("ink"), faint: colour("faint") };
    const card = colour("card");
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (let i = 0; i < this.nodes.length; i += 1) {
      const x = this.start[i] * across - left, y = this.top[i] * down - above;
      const full = this.nodes[i][PAGES] * across, tall = this.height[i] * down;
      if (x > width || y > height || x + full < 0 || y + tall < 0) continue;
      this.block(pen, this.nodes[i], x, y, full, tall, across, tones, card);
    }
  }

  block(pen, node, x, y, full, tall, across, tones, card) {
    const gap = tall > 3 ? 1 : 0;
    const high = Math.max(0.6, tall - gap), wide = Math.max(0.6, full - (full > 3 ? 1 : 0));
    const onDevice = Math.min(wide, node[DEVICE] * across);
    pen.globalAlpha = 0.22 + 0.78 * node[HEAT];
    if (onDevice > 0) {
      pen.fillStyle = tones.device;
      pen.fillRect(x, y, onDevice, high);
    }
    if (onDevice < wide) {
      pen.fillStyle = tones.host;
      pen.fillRect(x + onDevice, y, wide - onDevice, high);
    }
    pen.globalAlpha = 1;
    if (node[DISK] > 0 && high >= 5) {
      pen.fillStyle = tones.disk;
      pen.fillRect(x, y + high - 3, Math.min(wide, node[DISK] * across), 3);
    }
    if (node[IN_USE] && high >= 4 && wide >= 4) {
      pen.strokeStyle = tones.ink;
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, y + 1, wide - 2, high - 2);
      pen.lineWidth = 1;
    }
    if (node[HIDDEN] > 0) {
      pen.fillStyle = tones.faint;
      pen.fillRect(x + wide, y, 3, high);
    }
    const from = Math.max(x, 0), room = Math.min(x + wide, this.canvas.clientWidth) - from;
    if (high >= 17 && room >= 74) {
      // On a plate, so that it reads on every heat.
      const text = `${count(node[PAGES] * this.pageSize)} tokens`;
      const middle = Math.min(Math.max(y + high / 2, 11), Math.max(this.canvas.clientHeight - 11, y + 9));
      pen.fillStyle = card;
      pen.globalAlpha = 0.82;
      pen.fillRect(from + 6, middle - 8, pen.measureText(text).width + 8, 16);
      pen.globalAlpha = 1;
      pen.fillStyle = tones.ink;
      pen.fillText(text, from + 10, middle + 0.5);
    }
  }

  find(event) {
    const box = this.canvas.getBoundingClientRect();
    const { across, down, left, above } = this.scale();
    const page = (event.clientX - box.left + left) / across, row = (event.clientY - box.top + above) / down;
    for (let i = 0; i < this.nodes.length; i += 1) {
      const inside = page >= this.start[i] && page < this.start[i] + this.nodes[i][PAGES];
      if (inside && row >= this.top[i] && row < this.top[i] + this.height[i]) return i;
    }
    return -1;
  }

  zoom(factor, px = 0.5, py = 0.5) {
    const view = this.view;
    const w = Math.min(1, Math.max(1e-4, view.w * factor)), h = Math.min(1, Math.max(1e-4, view.h * factor));
    this.look(view.x + px * (view.w - w), view.y + py * (view.h - h), w, h);
  }

  move(dx, dy) {
    const { x, y, w, h } = this.view;
    this.look(x + dx * w, y + dy * h, w, h);
  }

  look(x, y, w, h) {
    const within = (start, size) => Math.min(Math.max(0, start), 1 - size);
    this.view = { x: within(x, w), y: within(y, h), w, h };
    this.redraw();
  }

  fill(i) {
    let end = this.start[i] + this.nodes[i][PAGES];
    const inside = new Set([i]);
    for (let k = i + 1; k < this.nodes.length; k += 1) {
      if (inside.has(this.nodes[k][PARENT])) {
        inside.add(k);
        end = Math.max(end, this.start[k] + this.nodes[k][PAGES]);
      }
    }
    const from = this.start[i] / this.depth;
    this.look(from, this.top[i] / this.rows, Math.max(1e-4, end / this.depth - from), Math.max(1e-4, this.height[i] / this.rows));
  }

  listen() {
    const canvas = this.canvas;
    let held = null;
    canvas.addEventListener("wheel", (event) => {
      // Only once it was clicked: who scrolls the page should not get stuck here.
      if (document.activeElement !== canvas && !event.ctrlKey) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      const factor = Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300)));
      this.zoom(factor, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      held = event;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => (held = null));
    canvas.addEventListener("pointercancel", () => (held = null));
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("pointermove", (event) => {
      if (held !== null) {
        this.move((held.clientX - event.clientX) / canvas.clientWidth, (held.clientY - event.clientY) / canvas.clientHeight);
        held = event;
        hideTip();
      } else {
        this.tell(event);
      }
    });
    canvas.addEventListener("dblclick", (event) => {
      const i = this.find(event);
      if (i >= 0) this.fill(i);
    });
    const keys = { "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7), 0: () => this.look(0, 0, 1, 1),
      ArrowLeft: () => this.move(-0.2, 0), ArrowRight: () => this.move(0.2, 0), ArrowUp: () => this.move(0, -0.2), ArrowDown: () => this.move(0, 0.2) };
    canvas.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    byId("in").addEventListener("click", () => this.zoom(0.7));
    byId("out").addEventListener("click", () => this.zoom(1 / 0.7));
    byId("fit").addEventListener("click", () => this.look(0, 0, 1, 1));
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }

  tell(event) {
    const i = this.find(event);
    if (i < 0) {
      hideTip();
      return;
    }
    const node = this.nodes[i], size = this.pageSize, first = this.start[i] * size;
    const line = (key, text, value) => element("div", "", key ? element("span", `key ${key}`) : null, `${text} `, element("b", "", value));
    const heat = node[IN_USE] ? "in use now" : node[HEAT] < 0.2 ? "goes soon" : node[HEAT] > 0.8 ? "stays long" : "in between";
    showTip(event,
      element("b", "", `tokens ${count(first)} to ${count(first + node[PAGES] * size)}`),
      line("device", "on the device", `${node[DEVICE]} of ${node[PAGES]} pages`),
      line("host", "on the host", `${node[HOST]} of ${node[PAGES]}`),
      line("disk", "on disk", `${node[DISK]} of ${node[PAGES]}`),
      line("", "used by ended requests", count(node[USES])),
      line("", "eviction:", heat),
      ...(node[HIDDEN] ? [line("", "branches not shown:", count(node[HIDDEN]))] : []));
  }
}

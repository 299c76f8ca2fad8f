// The map of cells: who owns which, drawn on a canvas, and read with pointer or keyboard.

import { count, h, quoted } from "./dom.js";

const LARGEST = 18; // of a cell's side, in CSS pixels
const TALLEST = 0.48; // of the map, in heights of the window
export const HUES = 8; // --hue-0 to --hue-7

export class CellMap {
  #seen = null; // the last /v1/cells
  #byIndex = new Map(); // cell index -> its place in #seen.cells
  #side = 1; // of a cell, in device pixels
  #columns = 1;
  #cursor = null; // the cell that is read
  #lit = null; // (cell) => whether it stays in full colour; null: all
  #patterns = new Map();
  #colours = new Map();

  /** `nameOf(session id)`: {name, number} of a conversation on the page, or undefined. */
  constructor(root, nameOf) {
    this.nameOf = nameOf;
    this.canvas = root.querySelector("canvas");
    this.part = Object.fromEntries(["bar", "counts", "readout", "legend", "map-total"].map((id) => [id, root.querySelector(`#${id}`)]));
    this.canvas.addEventListener("pointermove", (event) => this.#read(this.#at(event.offsetX, event.offsetY)));
    this.canvas.addEventListener("pointerleave", () => this.#read(null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("focus", () => this.#read(this.#cursor ?? 0));
    this.canvas.addEventListener("blur", () => this.#read(null));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    addEventListener("resize", () => this.draw());
  }

  /** Show what /v1/cells says. */
  show(seen) {
    this.#seen = seen;
    this.#byIndex = new Map(seen.cells.map((cell, i) => [cell[0], i]));
    this.#summary();
    this.draw();
    this.#readout();
  }

  /** Leave only some cells in full colour; null: all. */
  light(which) {
    this.#lit = which;
    this.draw();
  }

  /** The cells of a session at positions in [start, end). */
  span(session, start, end) {
    return ([, position, owners]) => position >= start && position < end && owners.some((id) => this.#owner(id).key === session);
  }

  /** Colours of the other theme. */
  repaint() {
    this.#patterns.clear();
    this.#colours.clear();
    this.draw();
  }

  // --- owners -------------------------------------------------------------------------------------------------------------------

  /** How an owner is shown: sessions each for itself, requests together, cached prefixes together. */
  #owner(id) {
    const owner = this.#seen.owners[id] ?? { kind: "prefix", evictable: false };
    if (owner.kind === "session") {
      const id = owner.session ?? owner.name;
      const known = this.nameOf(id);
      return { key: id, label: known?.name ?? owner.name, ink: known ? `hue-${known.number % HUES}` : "other", rank: known?.number ?? Infinity };
    }
    return owner.kind === "request" ? { key: "request", label: "Other requests", ink: "request", rank: Infinity } : { key: "prefix", label: "Cached prefixes", ink: "prefix", rank: Infinity };
  }

  /** Those of a cell, each once, in a steady order. */
  #ownersOf(cell) {
    const found = new Map(cell[2].map((id) => this.#owner(id)).map((owner) => [owner.key, owner]));
    return [...found.values()].sort((a, b) => (a.rank === b.rank ? (a.key < b.key ? -1 : 1) : a.rank - b.rank));
  }

  #isEvictable(cell) {
    return cell[2].every((id) => this.#seen.owners[id]?.evictable);
  }

  // --- numbers ------------------------------------------------------------------------------------------------------------------

  #summary() {
    const { cells, num_cells: total } = this.#seen;
    const shares = [0, 0, 0, 0, total - cells.length]; // one owner, the same but evictable, several owners, the same but evictable; free
    for (const cell of cells) shares[2 * (cell[2].length > 1) + this.#isEvictable(cell)]++;
    const [, pale, shared, sharedPale, free] = shares;
    const numbers = { Used: cells.length, Shared: shared + sharedPale, Evictable: pale + sharedPale, Free: free };
    this.part["map-total"].textContent = count(total, "cell");
    [...this.part.bar.children].forEach((part, i) => (part.style.flexGrow = shares[i]));
    this.part.counts.replaceChildren(
      ...Object.entries(numbers).map(([name, number]) => h("div", { class: name.toLowerCase() }, h("dt", {}, name), h("dd", {}, number.toLocaleString("en")))),
    );
    const owners = new Map();
    for (const cell of cells) {
      for (const owner of this.#ownersOf(cell)) {
        const entry = owners.get(owner.key) ?? { ...owner, cells: 0 };
        entry.cells++;
        owners.set(owner.key, entry);
      }
    }
    this.#legend([...owners.values()].sort((a, b) => b.cells - a.cells || a.rank - b.rank));
  }

  /** Written anew only when it changes, so that a focused entry keeps its focus. */
  #legend(owners) {
    const text = JSON.stringify(owners);
    if (text === this.part.legend.dataset.text) return;
    this.part.legend.dataset.text = text;
    const focused = document.activeElement?.dataset?.owner;
    this.part.legend.replaceChildren(
      ...(owners.length ? owners.map((owner) => this.#entry(owner)) : [h("li", { class: "faint" }, "Nobody owns a cell.")]),
    );
    if (focused) this.part.legend.querySelector(`[data-owner="${CSS.escape(focused)}"]`)?.focus();
  }

  #entry({ key, label, ink, cells }) {
    const light = () => this.light((cell) => this.#ownersOf(cell).some((owner) => owner.key === key));
    const dark = () => this.light(null);
    const text = [h("i", { class: `swatch ${ink}` }), h("span", { class: "name" }, label), h("span", { class: "faint" }, cells.toLocaleString("en"))];
    const button = { type: "button", class: "owner", "data-owner": key, onpointerenter: light, onpointerleave: dark, onfocus: light, onblur: dark };
    return h("li", {}, h("button", button, text));
  }

  // --- the drawing --------------------------------------------------------------------------------------------------------------

  /** Draw everything. Cost: a rectangle a cell. */
  draw() {
    const box = this.canvas.parentElement;
    if (!this.#seen || !box.clientWidth) return;
    const total = this.#seen.num_cells;
    const scale = devicePixelRatio || 1;
    const width = Math.floor(box.clientWidth * scale);
    const height = Math.floor(innerHeight * TALLEST * scale);
    let side = Math.floor(LARGEST * scale);
    while (side > 1 && Math.ceil(total / Math.floor(width / side)) * side > height) side--;
    const columns = Math.floor(width / side);
    this.#side = side;
    this.#columns = columns;
    const { canvas } = this;
    const rows = Math.ceil(total / columns);
    if (canvas.width !== columns * side || canvas.height !== rows * side) {
      canvas.width = columns * side;
      canvas.height = rows * side;
      canvas.style.width = `${canvas.width / scale}px`;
      canvas.style.height = `${canvas.height / scale}px`;
    }
    const pen = canvas.getContext("2d");
    const gap = side >= 4 * scale ? Math.max(1, Math.round(scale)) : side >= 3 ? 1 : 0;
    const square = (index, inset = 0) => {
      const x = (index % columns) * side + inset;
      const y = Math.floor(index / columns) * side + inset;
      pen.fillRect(x, y, side - gap - 2 * inset, side - gap - 2 * inset);
    };
    pen.globalAlpha = 1;
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = this.#colour("free");
    for (let index = 0; index < total; index++) square(index);
    for (const cell of this.#seen.cells) {
      pen.fillStyle = this.#fill(pen, this.#ownersOf(cell).map((owner) => owner.ink));
      pen.globalAlpha = this.#lit && !this.#lit(cell) ? 0.12 : this.#isEvictable(cell) && !this.#lit ? 0.55 : 1;
      square(cell[0]);
    }
    if (this.#cursor !== null) {
      pen.globalAlpha = 1;
      pen.lineWidth = Math.max(2, Math.round(2 * scale));
      pen.strokeStyle = this.#colour("text");
      const [x, y] = [(this.#cursor % columns) * side, Math.floor(this.#cursor / columns) * side];
      pen.strokeRect(x, y, Math.max(side - gap, 3 * scale), Math.max(side - gap, 3 * scale));
    }
  }

  /** One colour, or stripes. */
  #fill(pen, inks) {
    if (inks.length === 1) return this.#colour(inks[0]);
    const name = `${this.#side} ${inks.join(" ")}`;
    if (!this.#patterns.has(name)) {
      const stripe = Math.max(1, Math.round(this.#side / 3.5));
      const size = stripe * inks.length;
      const tile = h("canvas", { width: size, height: size });
      const ink = tile.getContext("2d");
      for (let x = 0; x < size; x++) {
        for (let y = 0; y < size; y++) {
          ink.fillStyle = this.#colour(inks[Math.floor(((x + y) % size) / stripe)]);
          ink.fillRect(x, y, 1, 1);
        }
      }
      this.#patterns.set(name, pen.createPattern(tile, "repeat"));
    }
    return this.#patterns.get(name);
  }

  /** What a custom property of the style sheet is in the present theme. */
  #colour(name) {
    if (!this.#colours.has(name)) {
      const probe = h("i");
      probe.style.color = `var(--${name})`;
      this.canvas.parentElement.append(probe);
      this.#colours.set(name, getComputedStyle(probe).color);
      probe.remove();
    }
    return this.#colours.get(name);
  }

  // --- reading a cell -----------------------------------------------------------------------------------------------------------

  #at(x, y) {
    const scale = devicePixelRatio || 1;
    const column = Math.floor((x * scale) / this.#side);
    const index = Math.floor((y * scale) / this.#side) * this.#columns + column;
    return this.#seen && x >= 0 && y >= 0 && column < this.#columns && index < this.#seen.num_cells ? index : null;
  }

  #key(event) {
    const last = (this.#seen?.num_cells ?? 1) - 1;
    const here = this.#cursor ?? 0;
    const moves = { ArrowLeft: here - 1, ArrowRight: here + 1, ArrowUp: here - this.#columns, ArrowDown: here + this.#columns, Home: 0, End: last };
    if (!(event.key in moves)) return;
    event.preventDefault();
    if (moves[event.key] >= 0 && moves[event.key] <= last) this.#read(moves[event.key]);
  }

  #read(index) {
    if (index === this.#cursor) return;
    this.#cursor = index;
    this.draw();
    this.#readout();
  }

  #readout() {
    if (!this.#seen) return;
    const cell = this.#seen.cells[this.#byIndex.get(this.#cursor)];
    let lines = ["Point at a cell, or move with the arrow keys, to read it.", ""];
    if (cell) {
      const [index, position, owners, token, text] = cell;
      const state = [owners.length > 1 && "shared", this.#isEvictable(cell) && "evictable"].filter(Boolean);
      lines = [
        `Cell ${index}, position ${position}: ${token < 0 ? "no token" : `${quoted(text)}, token ${token}`}`,
        [this.#ownersOf(cell).map((owner) => owner.label).join(", "), ...state].join(" · "),
      ];
    } else if (this.#cursor !== null) {
      lines = [`Cell ${this.#cursor}: free`, ""];
    }
    const text = lines.join("\n");
    if (this.part.readout.textContent !== text) this.part.readout.textContent = text;
  }
}

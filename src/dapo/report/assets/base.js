"use strict";
// Helpers of the page: build elements from text (never from markup), load data scripts, format numbers.

const dapo = {
  data: null,
  chunks: new Map(), // name -> value, for the pieces of rollouts that are held
  waiting: new Map(), // name -> functions to call when its script has run

  // Every data script is one call of this.
  put(name, value) {
    if (name === "page") {
      dapo.data = value;
      return;
    }
    dapo.chunks.set(name, value);
    for (const { resolve } of dapo.waiting.get(name) || []) resolve(value);
    dapo.waiting.delete(name);
  },

  // A value from a script next to the page. `fetch` does not work on file://, a script tag does.
  load(name, address) {
    if (dapo.chunks.has(name)) {
      const value = dapo.chunks.get(name);
      dapo.chunks.delete(name); // used again: now the most recent
      dapo.chunks.set(name, value);
      return Promise.resolve(value);
    }
    return new Promise((resolve, reject) => {
      const waiting = dapo.waiting.get(name);
      if (waiting) {
        waiting.push({ resolve, reject });
        return;
      }
      dapo.waiting.set(name, [{ resolve, reject }]);
      const failed = () => {
        for (const other of dapo.waiting.get(name) || []) other.reject(new Error(`${address} is missing`));
        dapo.waiting.delete(name);
      };
      const script = document.createElement("script");
      script.src = address;
      script.onerror = () => { script.remove(); failed(); };
      script.onload = () => { script.remove(); if (dapo.waiting.has(name)) failed(); };
      document.head.append(script);
      dapo.forget();
    });
  },

  // Keeps only the most recent pieces: a step of a large run is bigger than a page should be.
  HELD_PIECES: 24,
  forget() {
    const pieces = [...dapo.chunks.keys()].filter((name) => /\/\d+$/.test(name));
    for (const name of pieces.slice(0, Math.max(0, pieces.length - dapo.HELD_PIECES))) dapo.chunks.delete(name);
  },
};

const $ = (id) => document.getElementById(id);

// el("p", {class: "x"}, "text", child): children are nodes or text; text is never parsed.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Characters that would be invisible or reorder the line are escaped.
const INVISIBLE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const visible = (text) =>
  text.replace(INVISIBLE, (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

const format = {
  number(value, digits = 3) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size >= 10000) return Math.round(value).toLocaleString("en");
    if (size >= 100) return value.toFixed(0);
    if (size >= 10) return value.toFixed(1);
    if (size !== 0 && size < 0.001) return value.toExponential(1);
    return value.toFixed(digits);
  },
  percent(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const share = 100 * value;
    return `${share !== 0 && Math.abs(share) < 1 ? share.toFixed(2) : share.toFixed(share < 10 ? 1 : 0)} %`;
  },
  signed: (value) => (value === null || value === undefined || Number.isNaN(value) ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`),
};

const lastOf = (values) => {
  for (let i = (values || []).length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return null;
};

// ---------------------------------------------------------------- light and dark

const theme = {
  get isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  },
  listeners: [],
  toggle() {
    document.documentElement.dataset.theme = theme.isDark ? "light" : "dark";
    try { localStorage.setItem("dapo-theme", document.documentElement.dataset.theme); } catch { /* file:// may forbid it */ }
    for (const listener of theme.listeners) listener();
  },
  colour: (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(),
};
try {
  const kept = localStorage.getItem("dapo-theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
} catch { /* as above */ }

// A row of choices of which one is on.
function choices(label, options, chosen, onChoose) {
  const row = el("div", { class: "choices", role: "group", "aria-label": label });
  for (const [value, text] of options) {
    row.append(el("button", {
      type: "button", "data-value": value, "aria-pressed": String(value === chosen),
      onclick(event) {
        for (const other of row.children) other.setAttribute("aria-pressed", String(other === event.currentTarget));
        onChoose(value);
      },
    }, text));
  }
  return row;
}

// Text to run, with a button that copies it.
function commandLine(text) {
  const button = el("button", { type: "button", class: "quiet copy", title: "Copy" }, "copy");
  button.addEventListener("click", () => {
    const area = el("textarea", { style: { position: "fixed", opacity: "0" } });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy"); // navigator.clipboard is closed to file:// pages
    area.remove();
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1200);
  });
  return el("span", { class: "command" }, el("code", {}, text), button);
}

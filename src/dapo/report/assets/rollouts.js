"use strict";
// The rollout browser: a step, a problem, its responses side by side, token by token.

// Why a group was not trained on.
const DROPPED = { all_wrong: "all wrong", all_correct: "all correct", all_equal: "all equal" };
const whyDropped = (why) => DROPPED[why] || why;

const rollouts = {
  state: { run: 0, step: null, row: null, heat: "probability", use: "any", source: "any", verdict: "any", behaviour: "any", search: "", onlyTruncated: false, onlySplit: false, onlyClipped: false, everywhere: false },
  index: null,
  found: null, // Map "step/row" -> number of hits while a search is on
  SHOWN_TOKENS: 700, // of a response, until more are asked for
  COLOURED_TOKENS: 6000, // as many elements as a browser lays out without a pause; the rest of a response is plain

  get run() { return dapo.data.runs[rollouts.state.run]; },
  stepName: (step) => `step-${String(Number(step)).padStart(6, "0")}`,
  key: (step, part) => `${rollouts.stepName(step)}/${part}`,

  // Two runs have steps of the same name; what is held belongs to one of them.
  load(step, part) {
    return dapo.load(rollouts.key(step, part), `${rollouts.run.place}/${rollouts.key(step, part)}.js`);
  },

  draw() {
    const section = $("rollouts");
    const withRollouts = dapo.data.runs.map((run, at) => [run, at]).filter(([run]) => run.rollouts.length);
    if (!withRollouts.length) {
      section.replaceChildren(el("h2", {}, "Rollouts"), el("p", { class: "sub" }, "No step has been recorded. records.every_steps sets how often responses are recorded; 0 is never."));
      return;
    }
    rollouts.state.run = withRollouts[0][1];
    rollouts.list = el("div", { class: "group-list", role: "listbox", "aria-label": "Problems" });
    rollouts.pane = el("div", { class: "group" });
    rollouts.status = el("p", { class: "sub status", "aria-live": "polite" });
    rollouts.parts = el("div", { class: "histograms", id: "part-histograms" });
    section.replaceChildren(
      el("div", { class: "title-row" }, el("h2", {}, "Rollouts"), withRollouts.length > 1 ? rollouts.runChoice(withRollouts) : ""),
      rollouts.filters(), rollouts.parts,
      el("div", { class: "browser" }, el("aside", {}, rollouts.status, rollouts.list), rollouts.pane));
    const start = () => rollouts.show({ step: rollouts.run.rollouts[rollouts.run.rollouts.length - 1].step });
    new IntersectionObserver((entries, observer) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        observer.disconnect();
        if (rollouts.state.step === null) start();
      }
    }, { rootMargin: "400px" }).observe(section);
  },

  update() {
    const steps = rollouts.run.rollouts;
    if (!rollouts.slider) {
      if (steps.length) rollouts.draw();
      return;
    }
    rollouts.slider.max = String(steps.length - 1);
    rollouts.placeSlider();
  },

  runChoice: (runs) => choices("Run", runs.map(([run, at]) => [String(at), run.name]), String(rollouts.state.run), (at) => {
    rollouts.state.run = Number(at);
    rollouts.state.source = "any";
    dapo.chunks.clear();
    rollouts.draw();
  }),

  // ---------------------------------------------------------------- filters

  filters() {
    const on = (name) => (event) => {
      rollouts.state[name] = event.target.type === "checkbox" ? event.target.checked : event.target.value;
      rollouts.drawList();
    };
    const select = (name, label, options) => {
      const node = el("select", { id: `filter-${name}`, "aria-label": label, onchange: on(name) }, ...options.map(([value, text]) => el("option", { value }, text)));
      node.value = rollouts.state[name];
      return node;
    };
    const box = (name, text) => el("label", { class: "switch" }, el("input", { type: "checkbox", id: `filter-${name}`, checked: rollouts.state[name], onchange: on(name) }), text);
    rollouts.slider = el("input", { type: "range", min: "0", max: String(rollouts.run.rollouts.length - 1), id: "step-slider", "aria-label": "Step",
      oninput(event) { rollouts.label.textContent = `step ${rollouts.run.rollouts[event.target.value].step}`; },
      onchange(event) { rollouts.show({ step: rollouts.run.rollouts[event.target.value].step }); } });
    rollouts.label = el("output", { class: "step-label" });
    rollouts.searchBox = el("input", { type: "search", id: "search", placeholder: "Find a word in the responses", "aria-label": "Find a word in the responses",
      onkeydown(event) { if (event.key === "Enter") rollouts.search(event.target.value); },
      oninput(event) { if (!event.target.value) rollouts.search(""); } });
    return el("div", { class: "filters" },
      el("div", { class: "step-row" }, el("button", { type: "button", class: "quiet", "aria-label": "Earlier step", onclick: () => rollouts.shift(-1) }, "‹"),
        rollouts.slider, el("button", { type: "button", class: "quiet", "aria-label": "Later step", onclick: () => rollouts.shift(1) }, "›"), rollouts.label),
      el("div", { class: "search-row" }, rollouts.searchBox,
        el("button", { type: "button", id: "search-go", onclick: () => rollouts.search(rollouts.searchBox.value) }, "Find"), box("everywhere", "in all steps")),
      el("div", { class: "filter-row" },
        select("use", "Trained on or dropped", [["any", "trained or dropped"], ["trained", "trained on"], ["dropped", "dropped"], ...Object.entries(DROPPED).map(([why, text]) => [why, `dropped: ${text}`])]),
        ...(rollouts.run.sources.length ? [select("source", "Source", [["any", "any source"], ...rollouts.run.sources.map(({ name }) => [name, name])])] : []),
        select("verdict", "Verdict", [["any", "any verdict"], ["CORRECT", "some correct"], ["WRONG", "some wrong"], ["UNPARSEABLE", "some unparseable"]]),
        select("behaviour", "Behaviour", [["any", "any behaviour"], ...dapo.data.behaviour.map(([kind, meaning]) => [kind, meaning])]),
        box("onlyTruncated", "truncated"), box("onlySplit", "answers disagree"), box("onlyClipped", "with clipped tokens")));
  },

  passes(row) {
    const g = rollouts.index.groups;
    const { use, source, verdict, behaviour: kind, onlyTruncated, onlySplit, onlyClipped, search } = rollouts.state;
    const why = rollouts.dropped(row);
    if (use !== "any" && use !== (why || "trained") && !(use === "dropped" && why)) return false;
    if (source !== "any" && !g.id[row].startsWith(`${source}/`)) return false;
    if (verdict === "CORRECT" && !g.correct[row]) return false;
    if (verdict === "WRONG" && g.size[row] - g.correct[row] - g.unparseable[row] <= 0) return false;
    if (verdict === "UNPARSEABLE" && !g.unparseable[row]) return false;
    if (kind !== "any" && !g[kind][row]) return false;
    if (onlyTruncated && !g.truncated[row]) return false;
    if (onlySplit && g.answers[row] < 2) return false;
    if (onlyClipped && !(g.low[row] + g.high[row])) return false;
    return !search || rollouts.found.has(`${rollouts.state.step}/${row}`);
  },

  // Why a group was not trained on; "" where it was, as in all records of earlier versions.
  dropped: (row) => (rollouts.index.groups.dropped || [])[row] || "",

  shift(by) {
    const at = Number(rollouts.slider.value) + by;
    if (at >= 0 && at < rollouts.run.rollouts.length) rollouts.show({ step: rollouts.run.rollouts[at].step });
  },

  placeSlider() {
    const at = rollouts.run.rollouts.findIndex((r) => r.step === rollouts.state.step);
    rollouts.slider.value = String(Math.max(0, at));
    rollouts.label.textContent = `step ${rollouts.state.step}`;
  },

  // ---------------------------------------------------------------- opening

  // From elsewhere on the page: the recorded step nearest to the one asked for.
  open({ run = rollouts.state.run, step, behaviour: kind = "any" }) {
    if (run !== rollouts.state.run) {
      rollouts.state.run = run;
      dapo.chunks.clear();
    }
    if (!rollouts.run.rollouts.length) return;
    rollouts.state.behaviour = kind;
    const select = $("filter-behaviour");
    if (select) select.value = kind;
    const steps = rollouts.run.rollouts.map((r) => r.step);
    rollouts.show({ step: steps[curves.nearest(steps, step)] });
    $("rollouts").scrollIntoView({ behavior: "smooth" });
  },

  showClipped() {
    const at = rollouts.run.rollouts.findLast((r) => r.clipped_low.length + r.clipped_high.length);
    if (!at) return;
    rollouts.state.heat = "clipped";
    rollouts.state.onlyClipped = true;
    const box = $("filter-onlyClipped");
    if (box) box.checked = true;
    rollouts.show({ step: at.step });
  },

  async show({ step, row = null }) {
    rollouts.state.step = step;
    rollouts.placeSlider();
    try {
      rollouts.index = await rollouts.load(step, "index");
    } catch {
      rollouts.list.replaceChildren();
      rollouts.pane.replaceChildren(el("p", { class: "missing" }, `Missing: rollouts/${rollouts.key(step, "index")}.js. dapo report writes it again from the parquet file, if that exists.`));
      return;
    }
    if (rollouts.state.step !== step) return; // another step was asked for meanwhile
    rollouts.state.row = row;
    rollouts.drawParts();
    rollouts.drawList();
  },

  // How each part of the reward is spread over the step's trained responses; nothing where there are no parts.
  drawParts() {
    rollouts.parts.replaceChildren(...(rollouts.index.summary.parts || []).map(([name, unknown, bins]) => {
      const most = Math.max(1, ...bins.map((bin) => bin[2]));
      const range = ([from, to]) => (from === to ? format.number(from) : `${format.number(from)} to ${format.number(to)}`);
      return el("figure", { class: "histogram" },
        el("figcaption", {}, el("b", {}, name), el("span", { class: "sub" }, unknown ? ` unknown in ${unknown}` : "")),
        el("div", { class: "bins", role: "img", "aria-label": bins.map((bin) => `${range(bin)}: ${bin[2]}`).join(", ") },
          ...bins.map((bin) => el("span", { style: { height: `${(100 * bin[2]) / most}%` }, title: `${range(bin)}: ${bin[2]} responses` }))),
        el("div", { class: "ends sub" }, bins.length ? el("span", {}, format.number(bins[0][0])) : "no value", bins.length > 1 ? el("span", {}, format.number(bins[bins.length - 1][1])) : ""));
    }));
  },

  drawList() {
    if (!rollouts.index) return;
    const g = rollouts.index.groups;
    const rows = g.id.map((_, row) => row).filter(rollouts.passes);
    const hits = rollouts.state.search && rollouts.state.everywhere ? rollouts.hitSteps() : "";
    const nDropped = rows.filter(rollouts.dropped).length;
    rollouts.status.replaceChildren(`${rows.length} of ${g.id.length} problems${nDropped ? `, ${nDropped} dropped` : ""}`, hits);
    const parts = (rollouts.index.summary.parts || []).map(([name]) => name).slice(1);
    const columns = parts.length ? { gridTemplateColumns: `46px 40px repeat(${parts.length}, minmax(0, 1fr))` } : {};
    const inParts = parts.length ? "group-row in-parts" : "group-row";
    const head = parts.length ? [el("div", { class: `${inParts} head`, role: "presentation", style: columns }, el("span", {}, "correct"), el("span", {}), ...parts.map((name) => el("span", { class: "part", title: `part ${name}, mean of the group` }, name)))] : [];
    rollouts.list.replaceChildren(...head, ...rows.map((row) => el("button", {
      style: columns, type: "button", role: "option", class: inParts, "data-row": row, "aria-selected": String(row === rollouts.state.row), onclick: () => rollouts.pick(row),
    },
      el("span", { class: "text" }, visible(g.question[row]) || g.id[row],
        rollouts.dropped(row) ? el("span", { class: "dropped" }, `dropped: ${whyDropped(rollouts.dropped(row))}`) : null),
      el("span", { class: "tally", title: `${g.correct[row]} of ${g.size[row]} correct` },
        el("span", { class: "right", style: { flexGrow: g.correct[row] } }), el("span", { class: "wrong", style: { flexGrow: g.size[row] - g.correct[row] } })),
      el("span", { class: "count" }, `${g.correct[row]}/${g.size[row]}`),
      ...parts.map((_, at) => el("span", { class: "part" }, g.parts[row][at] === null ? "–" : format.number(g.parts[row][at]))))));
    const row = rows.includes(rollouts.state.row) ? rollouts.state.row : rows[0];
    if (row === undefined) rollouts.pane.replaceChildren(el("p", { class: "sub" }, "No problem of this step matches the filters."));
    else rollouts.pick(row);
  },

  async pick(row) {
    const { step } = rollouts.state;
    const g = rollouts.index.groups;
    rollouts.state.row = row;
    for (const node of rollouts.list.querySelectorAll("button")) node.setAttribute("aria-selected", String(Number(node.dataset.row) === row));
    const piece = String(Number(g.piece[row])).padStart(3, "0");
    let groups;
    try {
      groups = await rollouts.load(step, piece);
    } catch {
      rollouts.pane.replaceChildren(el("p", { class: "missing" }, `Missing: rollouts/${rollouts.key(step, piece)}.js. dapo report writes it again from the parquet file, if that exists.`));
      return;
    }
    if (rollouts.state.step === step && rollouts.state.row === row) rollouts.drawGroup(groups[g.at[row]]);
  },

  // ---------------------------------------------------------------- one group

  drawGroup(group) {
    rollouts.group = group;
    rollouts.responses = el("div", { class: "responses" });
    rollouts.scale = el("div", { class: "scale" });
    const heat = choices("Colour tokens by", Object.entries(HEATS).map(([name, heatMap]) => [name, heatMap.label]), rollouts.state.heat, (name) => { rollouts.state.heat = name; rollouts.paint(); });
    heat.id = "heat";
    const over = el("div", { class: "over" });
    rollouts.pane.replaceChildren(
      el("div", { class: "question" }, el("pre", { dir: "auto" }, visible(group.question)),
        el("p", { class: "sub" }, "reference ", el("b", {}, visible(group.answer)), ` · ${group.source ? `${visible(group.source)} · ` : ""}problem `, el("code", {}, visible(group.id)), group.visit ? ` · visit ${group.visit + 1}` : "",
          group.dropped ? ` · dropped (${whyDropped(group.dropped)}): not trained on` : "")),
      over, el("div", { class: "heat-row" }, heat, rollouts.scale), rollouts.responses);
    rollouts.responses.replaceChildren(...group.responses.map((response, at) => rollouts.card(response, at)));
    rollouts.paint();
    rollouts.followProblem(group.id, over);
  },

  card(response, at) {
    const isRight = response.verdict === "CORRECT";
    const parts = [`verdict ${format.signed(response.raw)}`];
    if (response.overlong) parts.push(`overlong ${format.signed(response.overlong)}`);
    for (const [name, value] of response.parts || []) parts.push(`${name} ${value === null ? "unknown" : format.signed(value)}`);
    const head = el("header", {},
      el("span", { class: `mark ${isRight ? "right" : response.verdict === "WRONG" ? "wrong" : "odd"}` }, isRight ? "correct" : response.verdict.toLowerCase()),
      el("span", { class: "reward", title: parts.join(", ") }, format.signed(response.reward)),
      el("span", { class: "sub" }, parts.length > 1 ? parts.join(" ") : ""),
      el("span", { class: "sub end" }, `${response.others ? `${response.others.length + 1} turns · ` : ""}${response.n} tokens · ${response.stop === "LENGTH" ? "truncated" : response.stop === "EOS" ? "ended" : response.stop.toLowerCase()}`));
    const kinds = response.behaviour.map((kind) => el("span", { class: "chip" }, behaviour.LABELS[kind].toLowerCase()));
    const body = response.unreadable
      ? el("p", { class: "missing" }, `This response cannot be read: ${visible(response.unreadable)}`)
      : el("pre", { class: "text", dir: "auto", "data-at": at });
    return el("article", { class: "response" }, head, body,
      el("footer", {}, response.extracted === null ? el("span", { class: "sub" }, "no answer found") : el("span", { class: "sub" }, "answer ", el("b", {}, visible(response.extracted))), ...kinds));
  },

  // Fill every response with coloured tokens; long ones in part, until asked for.
  paint() {
    const heat = HEATS[rollouts.state.heat];
    rollouts.scale.replaceChildren(...heat.scale());
    for (const body of rollouts.responses.querySelectorAll("pre.text")) rollouts.fill(body, heat);
  },

  fill(body, heat) {
    const response = rollouts.group.responses[body.dataset.at];
    const tokens = tokensOf(response);
    const hits = rollouts.hitsIn(response.text);
    const wanted = body.dataset.whole || hits.length ? tokens.length : rollouts.SHOWN_TOKENS;
    const n = Math.min(wanted, tokens.length, rollouts.COLOURED_TOKENS);
    const parts = document.createDocumentFragment();
    for (let i = 0; i < n; i++) {
      const token = tokens[i];
      if (response.others && (i === 0 || token.isOther !== tokens[i - 1].isOther)) {
        parts.append(el("span", { class: "speaker" }, token.isOther ? "environment" : "model"));
      }
      const isHit = hits.some(([from, to]) => token.from < to && token.to > from);
      const span = el(isHit ? "mark" : "span", { class: token.isOther ? "is-other" : token.n > 0 && heat.mark ? heat.mark(token) : undefined });
      span.textContent = token.to > token.from ? visible(response.text.slice(token.from, token.to)) : "·";
      const colour = token.isKnown && !token.isOther && heat.colour ? heat.colour(token) : null;
      if (colour && !isHit) span.style.backgroundColor = colour;
      span.token = token;
      parts.append(span);
    }
    if (wanted > n) parts.append(rollouts.plain(response.text, n ? tokens[n - 1].to : 0, hits));
    body.replaceChildren(parts);
    if (tokens.length > wanted) {
      body.append(el("button", { type: "button", class: "more", onclick() { body.dataset.whole = "yes"; rollouts.fill(body, HEATS[rollouts.state.heat]); } },
        `show the other ${(tokens.length - wanted).toLocaleString("en")} tokens`));
    }
  },

  // The rest of a very long response: text and hits, without a colour per token.
  plain(text, from, hits) {
    const parts = document.createDocumentFragment();
    for (const [start, end] of hits.filter((hit) => hit[1] > from)) {
      parts.append(visible(text.slice(from, Math.max(from, start))), el("mark", {}, visible(text.slice(Math.max(from, start), end))));
      from = end;
    }
    parts.append(visible(text.slice(from)));
    return parts;
  },

  // ---------------------------------------------------------------- the same problem over the steps

  async followProblem(id, place) {
    let history;
    try {
      history = await dapo.load(`history-${rollouts.state.run}`, `report/history-${rollouts.state.run}.js`);
    } catch { return; }
    rollouts.visits ||= new Map();
    if (rollouts.visitsOf !== history) {
      rollouts.visits = new Map(history.problems);
      rollouts.visitsOf = history;
    }
    const visits = rollouts.visits.get(id) || [];
    if (rollouts.group.id !== id) return;
    place.replaceChildren(el("span", { class: "sub" }, visits.length > 1 ? "this problem over the steps: " : "recorded in this step only"),
      ...(visits.length > 1 ? visits.map(([at, row, correct, size]) => el("button", {
        type: "button", class: "visit", title: `step ${history.steps[at]}: ${correct} of ${size} correct`,
        "aria-current": String(history.steps[at] === rollouts.state.step),
        onclick: () => rollouts.jump(history.steps[at], row),
      }, el("b", {}, String(history.steps[at])), ` ${correct}/${size}`)) : []));
  },

  jump(step, row) {
    Object.assign(rollouts.state, { use: "any", source: "any", verdict: "any", behaviour: "any", onlyTruncated: false, onlySplit: false, onlyClipped: false, search: "" });
    rollouts.searchBox.value = "";
    for (const name of ["use", "source", "verdict", "behaviour"]) if ($(`filter-${name}`)) $(`filter-${name}`).value = "any";
    for (const name of ["onlyTruncated", "onlySplit", "onlyClipped"]) $(`filter-${name}`).checked = false;
    rollouts.show({ step, row });
  },

  // ---------------------------------------------------------------- search

  hitsIn(text) {
    const word = rollouts.state.search.toLowerCase();
    if (!word) return [];
    const hits = [];
    const lower = text.toLowerCase();
    for (let at = lower.indexOf(word); at >= 0 && hits.length < 500; at = lower.indexOf(word, at + word.length)) hits.push([at, at + word.length]);
    return hits;
  },

  // Reads the responses piece by piece; a search that is overtaken by another ends.
  async search(word) {
    rollouts.state.search = word.trim();
    rollouts.found = new Map();
    if (!rollouts.state.search) { rollouts.drawList(); return; }
    const own = (rollouts.searching = {});
    const steps = rollouts.state.everywhere ? rollouts.run.rollouts.map((r) => r.step) : [rollouts.state.step];
    for (const step of steps) {
      const index = await rollouts.load(step, "index").catch(() => null);
      if (!index) continue;
      for (let piece = 0; piece < index.summary.pieces; piece++) {
        const groups = await rollouts.load(step, String(piece).padStart(3, "0")).catch(() => []);
        if (rollouts.searching !== own) return;
        rollouts.status.textContent = `searching step ${step}, ${piece + 1} of ${index.summary.pieces}`;
        index.groups.piece.forEach((of, row) => {
          if (of !== piece || !groups.length) return;
          const group = groups[index.groups.at[row]];
          const n = [group.question, ...group.responses.map((r) => r.text)].reduce((sum, text) => sum + rollouts.hitsIn(text).length, 0);
          if (n) rollouts.found.set(`${step}/${row}`, n);
        });
      }
    }
    const here = [...rollouts.found.keys()].some((key) => key.startsWith(`${rollouts.state.step}/`));
    const [first] = rollouts.found.keys();
    if (!here && first) rollouts.show({ step: Number(first.split("/")[0]) });
    else rollouts.drawList();
  },

  hitSteps() {
    const counts = new Map();
    for (const key of rollouts.found.keys()) counts.set(key.split("/")[0], (counts.get(key.split("/")[0]) || 0) + 1);
    return el("span", { class: "hit-steps" }, ...[...counts].map(([step, n]) => el("button", { type: "button", class: "visit", onclick: () => rollouts.show({ step: Number(step) }) }, el("b", {}, step), ` ${n}`)));
  },
};

// ---------------------------------------------------------------- tokens and their numbers

function bytesOf(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new DataView(bytes.buffer);
}

// IEEE half precision, little-endian.
function halves(text) {
  if (!text) return null;
  const view = bytesOf(text);
  const values = new Float32Array(view.byteLength / 2);
  for (let i = 0; i < values.length; i++) {
    const bits = view.getUint16(2 * i, true);
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    values[i] = sign * (exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  }
  return values;
}

// The tokens of a response: where each stands in its text, and what is known of it.
function tokensOf(response) {
  if (response.tokens) return response.tokens;
  if (!response.units) return (response.tokens = [{ from: 0, to: response.text.length, n: 0, isKnown: false }]);
  const units = bytesOf(response.units);
  const [logp, entropy, logRatio] = [halves(response.logp), halves(response.entropy), halves(response.log_ratio)];
  const advantage = typeof response.advantage === "string" ? halves(response.advantage) : null;
  const clip = new Map(response.clip);
  const others = new Set((response.others || []).flatMap(([from, to]) => Array.from({ length: to - from }, (_, i) => from + i)));
  const tokens = [];
  let at = 0;
  const width = response.wide ? 4 : 2;
  for (let i = 0; i < units.byteLength / width; i++) {
    const size = response.wide ? units.getUint32(4 * i, true) : units.getUint16(2 * i, true);
    tokens.push({
      from: at, to: at + size, n: i + 1, isKnown: true, p: logp ? Math.exp(logp[i]) : NaN, entropy: entropy ? entropy[i] : NaN,
      ratio: logRatio ? Math.exp(logRatio[i]) : NaN, advantage: advantage ? advantage[i] : response.advantage ?? NaN, clip: clip.get(i) || 0, isOther: others.has(i),
    });
    at += size;
  }
  return (response.tokens = tokens);
}

const mix = (name, strength) => (Number.isFinite(strength) && strength > 0.01 ? `color-mix(in srgb, var(--${name}) ${Math.round(100 * Math.min(1, strength))}%, transparent)` : null);
const ramp = (low, from, high) => [low, el("span", { class: `ramp ${from}` }), high];

const HEATS = {
  probability: { label: "probability", colour: (t) => mix("accent", 0.75 * (1 - t.p) ** 0.7), scale: () => ramp("certain", "one", "unlikely") },
  entropy: { label: "entropy", colour: (t) => mix("accent", 0.75 * Math.min(1, t.entropy / 2)), scale: () => ramp("0", "one", "2 nats") },
  ratio: {
    label: "ratio", colour: (t) => (t.ratio > 1 ? mix("high", Math.min(0.8, 3 * (t.ratio - 1))) : mix("low", Math.min(0.8, 3 * (1 - t.ratio)))),
    scale: () => ramp("0.75 less likely now", "two", "1.25 more likely now"),
  },
  advantage: {
    label: "advantage", colour: (t) => (t.advantage > 0 ? mix("high", Math.min(0.7, t.advantage / 4)) : mix("low", Math.min(0.7, -t.advantage / 4))),
    scale: () => ramp("negative", "two", "positive"),
  },
  clipped: {
    label: "clipped", colour: (t) => (t.clip ? mix(t.clip > 0 ? "high" : "low", 0.75) : null), mark: (t) => (t.clip ? "is-clipped" : undefined),
    scale: () => [el("i", { class: "key", style: { background: "var(--low)" } }), "clipped at 1 − ε_low ", el("i", { class: "key", style: { background: "var(--high)" } }), "clipped at 1 + ε_high"],
  },
  none: { label: "plain", scale: () => [] },
};

// What is known of the token under the pointer.
document.addEventListener("pointerover", (event) => {
  const token = event.target.token;
  const tip = $("tip");
  tip.hidden = !token || !token.isKnown;
  if (tip.hidden) return;
  const shown = token.isOther ? [["said by", "the environment: not trained on"]] : [["probability", format.percent(token.p)], ["entropy", `${format.number(token.entropy)} nats`], ["ratio", Number.isNaN(token.ratio) ? "not trained on" : token.ratio.toFixed(3)],
    ["advantage", format.signed(token.advantage)], ["clipped", token.clip > 0 ? "high" : token.clip < 0 ? "low" : "no"]];
  tip.replaceChildren(el("b", {}, `token ${token.n}`), ...shown.map(([name, text]) => el("span", {}, `${name} `, el("b", {}, text))));
  const box = event.target.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.bottom + 8 + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight - 8 : box.bottom + 8}px`;
});
addEventListener("scroll", () => { $("tip").hidden = true; }, { passive: true });

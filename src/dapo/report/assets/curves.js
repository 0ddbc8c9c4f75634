"use strict";
// The curves: one chart per question, one hover for all of them, several runs in one chart.

// A series is a metric by name, or a function of a run that gives one value per step.
const perStep = (run, f) => (run.metrics.step || []).map((_, i) => f((name) => (run.metrics[name] || [])[i] ?? null));
const WASTE = ["all_wrong", "all_correct", "all_equal", "truncated", "surplus", "aborted", "stale"];
const wasteShare = (cause) => (run) => perStep(run, (m) => (m("tokens/generated") ? (m(`tokens/wasted_${cause}`) || 0) / m("tokens/generated") : null));
const phase = (name) => (run) => perStep(run, (m) => m(`timing.${name}_s`));
const waiting = (m) => (m("timing.verdicts_s") || 0) + (m("timing.environments_s") || 0);
const generation = (run) => perStep(run, (m) => (m("timing.rollout_s") === null ? null
  : Math.max(0, m("timing.rollout_s") - (m("timing.tail_s") || 0) - waiting(m))));
const otherTime = (run) => perStep(run, (m) => (m("timing.step_s") === null ? null
  : Math.max(0, m("timing.step_s") - (m("timing.rollout_s") || 0) - (m("timing.old_logp_s") || 0) - (m("timing.update_s") || 0))));

// Of a step without a token clipped high there is no probability to speak of.
const clippedProbability = (which) => (run) => perStep(run, (m) => (m("clip/high") ? m(`clip/high_probability_${which}`) : null));

const CHARTS = [
  { id: "evaluation", title: "Evaluation", kind: "evaluation", note: "avg@k on held-out problems with its 95 % interval; pass@k and maj@k thin.",
    paper: "DAPO Table 1, AIME 2024 avg@32, Qwen2.5-32B: naive GRPO 0.30, overlong filtering 0.36, clip-higher 0.38, soft punishment 0.41, token loss 0.42, dynamic sampling 0.50." },
  { id: "accuracy", title: "Training accuracy", series: [["accuracy", "all verified"]], unit: "share",
    note: "Share of correct responses among all that were verified, dropped groups included." },
  { id: "reward", title: "Reward and its components", series: [["reward/mean", "reward"], ["reward/raw", "verdict"], ["reward/overlong", "overlong"]],
    note: () => `Mean of the trained responses: ${dapo.data.runs.some((run) => run.verifier.includes(":") || run.verifier === "command") ? "what the reward function gives" : "the verifier’s ±1"}, plus the overlong penalty${partNames().length ? " and the other parts by their weights" : ""}.`,
    paper: "DAPO Fig. 7b: the training reward rises steadily and predicts held-out accuracy poorly." },
  { id: "length", title: "Response length", series: [["length/mean", "mean"], ["length/p10", "10 %"], ["length/p90", "90 %"]], unit: "tokens",
    note: "Tokens of the trained responses: mean, 10th and 90th percentile.", paper: "DAPO Fig. 7a: grows overall, with phases of stagnation or decline." },
  { id: "truncated", title: "Truncated responses", series: [["length/truncated", "truncated"]], unit: "share", note: "Share of verified responses that reached the length limit.",
    paper: "DAPO Fig. 5: masking truncated samples in the loss stabilizes training." },
  { id: "verdicts", title: "Verdicts other than correct", series: [["verdict/wrong", "wrong"], ["verdict/unparseable", "unparseable"], [(run) => perStep(run, (m) => (m("verdict/timeout") === null ? null : m("verdict/timeout") + (m("verdict/crash") || 0))), "verifier failed"]], unit: "share",
    note: "Shares of the trained responses." },
  { id: "episodes", title: "Turns and tool calls", series: [["episode/turns", "turns"], ["episode/tool_calls", "tool calls"]],
    note: "Mean number in a trained episode: the model’s turns, and its calls of tools." },
  { id: "tool-failures", title: "Tool calls that failed", series: [["episode/tool_failures", "failed"]], unit: "share", note: "Share of the tool calls of the trained episodes." },
  { id: "environments", title: "Time waited for the environment", series: [["timing.environments_s", "waited"]], unit: "s", note: "Seconds of a step’s rollout spent only waiting for environments." },
  { id: "entropy", title: "Entropy", series: [["policy/entropy", "entropy"]], unit: "nats", note: "Mean over the trained tokens, under the weights at the start of the step.",
    paper: "DAPO Fig. 2b: with ε_high = ε_low it collapses; clip-higher prevents that. Fig. 7c: a slow upward trend is a good sign." },
  { id: "probability", title: "Mean probability", series: [["policy/probability", "probability"]], unit: "share", free: true, note: "Of the trained tokens. High means a confident policy.",
    paper: "DAPO Fig. 7d: the mirror image of entropy." },
  { id: "clip", title: "Clipped tokens", series: [["clip/high", "high"], ["clip/low", "low"], ["clip/dual", "dual"]], unit: "share", sided: true,
    note: "High: positive-advantage tokens clipped at 1 + ε_high. Low: negative-advantage tokens clipped at 1 − ε_low." },
  { id: "clip-probability", title: "Probability of tokens clipped high", series: [[clippedProbability("mean"), "mean"], [clippedProbability("max"), "largest"]], unit: "share",
    note: "Unlikely tokens whose increase was clipped.", paper: "DAPO Fig. 3a: the largest stays below 0.2, the reason for clip-higher.", lines: [0.2] },
  { id: "kl", title: "KL", series: [["policy/kl_old", "to π_old"], ["policy/kl_ref", "to the reference"]], unit: "nats", note: "How far the updates of a step move the policy." },
  { id: "gap", title: "Trainer against engine", series: [["engine/gap_mean", "mean gap"], ["engine/kl", "KL"]], unit: "nats", note: "|log π_trainer − log π_engine| on the sampled tokens; should be close to 0." },
  { id: "drafts", title: "Drafts", series: [["engine/drafted", "guessed"], ["engine/accepted", "accepted"]], unit: "tokens", note: "Tokens guessed in the tail of a step, and those of them that were drawn." },
  { id: "correction", title: "Importance weights", series: [["engine/effective_sample_size", "effective sample size"], ["engine/masked", "masked"]], unit: "share", note: "Share of tokens in effect under the importance weights, and of tokens that a masked correction leaves out." },
  { id: "gradient", title: "Gradient norm", series: [["policy/grad_norm", "policy"], ["critic/grad_norm", "critic"]], note: "Before clipping, mean over the step’s updates." },
  { id: "critic", title: "Critic", series: [["critic/explained_variance", "explained variance"]], note: "1 is perfect, 0 is no better than predicting the mean return." },
  { id: "acceptance", title: "Mixed groups", series: [["sampling/groups_kept", "mixed"]], unit: "share", note: "Share of finished groups that are neither all correct nor all wrong: only these have a non-zero group advantage.",
    paper: "DAPO Fig. 3b: the share of all-correct prompts keeps growing, so fewer give a gradient." },
  { id: "overtaken", title: "Lengths: trained on against overtaken", series: [["sampling/length_kept", "trained on"], ["sampling/length_overtaken", "overtaken"]], unit: "tokens", note: "Partial rollouts: mean length of the groups trained on, and of those that an earlier step left unfinished. Far apart: short groups go first." },
  { id: "waste", title: "Wasted tokens, by cause", stacked: true, unit: "share", series: WASTE.map((cause) => [wasteShare(cause), { all_wrong: "all wrong", all_correct: "all correct", all_equal: "all equal", truncated: "truncated", surplus: "surplus", aborted: "aborted", stale: "stale" }[cause]]),
    note: "Share of all generated tokens that entered no update." },
  { id: "sources-share", title: "Sources: prompts submitted, groups trained on", kind: "sources", unit: "share", series: [["share_submitted", "submitted"], ["share_kept", "trained on"]],
    note: "Each source’s share of the prompts submitted (thick; its weight, in the long run) and of the groups trained on (dotted)." },
  { id: "sources-accuracy", title: "Sources: accuracy", kind: "sources", unit: "share", series: [["accuracy", ""]], note: "Share of correct responses among all of a source that were verified." },
  { id: "sources-kept", title: "Sources: mixed groups", kind: "sources", unit: "share", series: [["groups_kept", ""]], note: "Share of a source’s groups that are mixed. A source near 0 teaches nothing any more." },
  { id: "sources-length", title: "Sources: response length", kind: "sources", unit: "tokens", series: [["length", ""]], note: "Mean length of a source’s responses." },
  { id: "sources-waste", title: "Sources: wasted tokens", kind: "sources", unit: "share", series: [["waste", ""]], note: "Share of a source’s tokens in groups that are not mixed." },
  { id: "sources-posterior", title: "Sources: posterior pass rate", kind: "sources", unit: "share", series: [["pass_rate", ""]], note: "Mean over the problems of a source seen so far." },
  { id: "sources-retired", title: "Retired problems", kind: "sources", series: [["retired", ""]], note: "Retired problems of a source: their posterior pass rate is at or above sampling.retire_above." },
  { id: "retired", title: "Retired problems, all", series: [["sampling/retired", "retired"]], note: "Problems whose posterior pass rate is at or above sampling.retire_above." },
  { id: "time", title: "Time by phase", stacked: true, unit: "s", series: [[generation, "rollout"], [phase("tail"), "last responses"], [(run) => perStep(run, waiting), "waiting"], [phase("old_logp"), "π_old"], [phase("update"), "updates"], [otherTime, "other"]], note: "Seconds per step. Last responses: at most an eighth of the most that ran together. Waiting: for verdicts and environments." },
  { id: "speed", title: "Tokens per second", unit: "tokens/s", series: [[(run) => perStep(run, (m) => (m("timing.step_s") ? m("tokens/generated") / m("timing.step_s") : null)), "generated"], [(run) => perStep(run, (m) => (m("timing.step_s") ? m("tokens/trained") / m("timing.step_s") : null)), "trained on"]],
    note: "Over the whole step." },
];

// A reward in parts: the mean of each, and how much of the advantages is due to each. Names come from the config.
const partNames = () => [...new Set(dapo.data.runs.flatMap((run) => run.parts.map(([name]) => name)))];
const weightOf = (name) => dapo.data.runs.flatMap((run) => run.parts).find(([own]) => own === name)[1];
const partCharts = () => (partNames().length ? [
  { id: "part-shares", title: "What decides the advantage", every: true, unit: "share", series: partNames().map((name) => [`reward/part/${name}/share`, name]),
    note: "Share of the advantages’ variance that is due to each part of the reward; all parts sum to 100 %, one that pulls against the others is negative." },
  ...partNames().map((name) => ({ id: `part-${name}`, title: `Reward part: ${name}`, every: true, series: [[`reward/part/${name}/mean`, "mean"], [`reward/part/${name}/std`, "std"]],
    note: `Over the trained responses, before its weight${weightOf(name) === null ? ": it has none and is only recorded" : ` of ${weightOf(name)}`}.${name === "correct" ? " The verifier’s own: what counts as correct." : ""}` })),
] : []);
const allCharts = () => CHARTS.flatMap((chart) => (chart.id === "reward" ? [chart, ...partCharts()] : [chart]));

const whenIdle = (work) => (window.requestIdleCallback || setTimeout)(work);

const curves = {
  smoothing: 0,
  axis: "step",
  showPaper: false,
  cards: new Map(), // chart id -> {plot, readout, chart, lines}
  plotly: null,
  isWaiting: false,

  draw() {
    const section = $("curves");
    const grid = el("div", { class: "charts" });
    for (const chart of allCharts()) if (curves.linesOf(chart).length) grid.append(curves.card(chart));
    section.replaceChildren(
      el("div", { class: "title-row" }, el("h2", {}, "Curves"), curves.controls()),
      dapo.data.runs.length > 1 ? curves.legend() : "",
      grid.children.length ? grid : el("p", { class: "sub" }, "No step has finished yet."));
    behaviour.draw();
    whenIdle(() => curves.loadPlotly().then(curves.drawRest));
  },

  listen() { theme.listeners.push(() => curves.redraw()); },

  controls() {
    return el("div", { class: "controls" },
      choices("Smoothing", [["0", "raw"], ["0.6", "smooth"], ["0.9", "smoother"]], String(curves.smoothing), (v) => { curves.smoothing = Number(v); curves.redraw(); }),
      choices("Horizontal axis", [["step", "steps"], ["tokens", "tokens"], ["time", "hours"]], curves.axis, (v) => { curves.axis = v; curves.redraw(); }),
      el("label", { class: "switch" }, el("input", { type: "checkbox", id: "paper", onchange(event) {
        curves.showPaper = event.target.checked;
        document.documentElement.toggleAttribute("data-paper", curves.showPaper);
        curves.redraw();
      } }), "compare with the paper"));
  },

  legend: () => el("p", { class: "legend" }, ...dapo.data.runs.map((run, at) =>
    el("span", {}, el("i", { class: "key", style: { background: `var(--run-${at})` } }), run.name))),

  card(chart) {
    const readout = el("div", { class: "readout" });
    const plot = el("div", { class: "plot" });
    const node = el("figure", { class: "chart", id: `chart-${chart.id}` },
      el("figcaption", {}, el("b", {}, chart.title), readout), plot,
      el("p", { class: "note" }, typeof chart.note === "function" ? chart.note() : chart.note),
      chart.paper ? el("p", { class: "paper" }, chart.paper) : null);
    curves.cards.set(chart.id, { chart, readout, plot, lines: [], isDrawn: false });
    curves.seen.observe(plot);
    plot.dataset.chart = chart.id;
    return node;
  },

  // Charts are drawn when they come near the window, so that a long page is there at once.
  seen: new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      curves.seen.unobserve(entry.target);
      curves.loadPlotly().then(() => curves.plot(curves.cards.get(entry.target.dataset.chart)));
    }
  }, { rootMargin: "200px" }),

  // The others follow one by one while the page is idle, so that a printed page has them all.
  drawRest() {
    const next = [...curves.cards.values()].find((card) => !card.isDrawn && card.plot.isConnected);
    if (!next || curves.isWaiting) return;
    curves.isWaiting = true;
    whenIdle(() => {
      curves.isWaiting = false;
      curves.seen.unobserve(next.plot);
      if (!next.isDrawn) curves.plot(next);
      curves.drawRest();
    });
  },

  loadPlotly() {
    if ($("packed")) curves.plotly ||= curves.unpackPlotly($("packed"));
    curves.plotly ||= new Promise((resolve) => {
      const script = el("script", { src: "report/plotly.min.js" });
      script.onload = resolve;
      document.head.append(script);
    });
    return curves.plotly;
  },

  // A page in a frame has no file beside it: it holds plotly, compressed.
  async unpackPlotly(packed) {
    const bytes = Uint8Array.from(atob(packed.textContent), (c) => c.charCodeAt(0));
    const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const script = el("script", { nonce: packed.nonce });
    script.textContent = text;
    document.head.append(script);
  },

  // ---------------------------------------------------------------- from metrics to lines

  xOf(run) {
    const steps = run.metrics.step || [];
    if (curves.axis === "step") return steps;
    const name = curves.axis === "tokens" ? "tokens/generated" : "timing.step_s";
    let sum = 0;
    return (run.metrics[name] || []).map((value) => { sum += (value || 0) / (curves.axis === "tokens" ? 1 : 3600); return sum; });
  },

  // Evaluations know their step only: the axis value of that step.
  xAt(run, step) {
    if (curves.axis === "step") return step;
    const at = (run.metrics.step || []).findLastIndex((s) => s <= step);
    return at < 0 ? 0 : curves.xOf(run)[at];
  },

  linesOf(chart) {
    const several = dapo.data.runs.length > 1;
    const lines = [];
    dapo.data.runs.forEach((run, at) => {
      if (chart.kind === "evaluation") lines.push(...curves.evaluationLines(run, at, several));
      else if (chart.kind === "sources") lines.push(...curves.sourceLines(chart, run, at, several));
      else if (chart.kind === "behaviour") lines.push(...behaviour.lines(run, at, several));
      else if (chart.stacked && several) lines.push(curves.sumLine(chart, run, at));
      else {
        chart.series.forEach(([metric, label], s) => {
          const y = typeof metric === "string" ? run.metrics[metric] : metric(run);
          const hasAny = (y || []).some((v) => v !== null && (!chart.stacked || v > 0));
          // A line that is zero throughout only says that a part is off.
          if (hasAny && (s === 0 || chart.every || y.some((v) => v))) {
            lines.push({ label, run: at, x: curves.xOf(run), y, colour: several ? `run-${at}` : curves.hue(chart, s), dash: several && s ? "dot" : "solid", isFirst: s === 0 });
          }
        });
      }
    });
    for (const curve of dapo.data.overlay) {
      const own = chart.kind === "evaluation" ? "avg@k" : null;
      if (curve.metric === own || (chart.series || []).some(([metric]) => metric === curve.metric)) {
        if (curves.axis === "step" && lines.length) lines.push({ label: curve.label, run: -1, x: curve.x, y: curve.y, colour: "soft", dash: "dash" });
      }
    }
    return lines;
  },

  hue: (chart, s) => (chart.sided ? ["high", "low", "soft"] : ["accent", "second", "third", "fourth", "fifth", "soft"])[chart.sided ? s : s % 6],

  sumLine(chart, run, at) {
    const parts = chart.series.map(([metric]) => metric(run));
    const y = (parts[0] || []).map((_, i) => parts.reduce((sum, part) => sum + (part[i] || 0), 0));
    return { label: "total", run: at, x: curves.xOf(run), y, colour: `run-${at}`, dash: "solid", isFirst: true };
  },

  evaluationLines(run, at, several) {
    const lines = [];
    [...new Set(run.evaluations.map((line) => line.set))].forEach((set, s) => {
      const own = run.evaluations.filter((line) => line.set === set);
      const x = own.map((line) => curves.xAt(run, line.step));
      const colour = several ? `run-${at}` : ["accent", "second", "third", "fourth"][s % 4];
      const k = own[0].k;
      lines.push({
        label: run.evaluations[0].set === set ? `avg@${k}` : `${set.split(/[/:]/).pop()} avg@${k}`, run: at, x, y: own.map((line) => line.avg), colour, dash: s ? "dot" : "solid", isFirst: true, points: true,
        low: own.map((line) => line.avg_interval[0]), high: own.map((line) => line.avg_interval[1]), raw: true,
      });
      if (!several && s === 0) {
        lines.push({ label: `pass@${k}`, run: at, x, y: own.map((line) => line.pass), colour: "third", dash: "dot", raw: true });
        if (own.some((line) => line.maj !== null)) lines.push({ label: `maj@${k}`, run: at, x, y: own.map((line) => line.maj), colour: "second", dash: "dot", raw: true });
      }
    });
    return lines;
  },

  // One line per source, a second dotted one where the chart compares two shares; of several runs their colours tell.
  sourceLines(chart, run, at, several) {
    const colours = ["accent", "second", "third", "fourth", "fifth", "soft"];
    return run.sources.flatMap((source, s) => chart.series.map(([metric, label], m) => ({
      label: [source.name, label].filter(Boolean).join(" "), run: at, x: curves.xOf(run), y: source.metrics[metric],
      colour: several ? `run-${at}` : colours[s % colours.length], dash: m ? "dot" : "solid", isFirst: m === 0,
    }))).filter((line) => line.y.some((value) => value !== null));
  },

  // Exponential mean, corrected for its start.
  smooth(values, weight) {
    let mean = 0;
    let mass = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      return mean / mass;
    });
  },

  // ---------------------------------------------------------------- drawing

  traces(card) {
    const traces = [];
    for (const line of card.lines) {
      const colour = theme.colour(line.colour);
      const base = { x: line.x, hoverinfo: "none", mode: line.points ? "lines+markers" : "lines", marker: { size: 5, color: colour }, connectgaps: true };
      if (line.low) {
        traces.push({ ...base, y: line.low, mode: "lines", line: { width: 0 } });
        traces.push({ ...base, y: line.high, mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: curves.faded(colour, 0.16) });
      }
      const weight = line.raw ? 0 : curves.smoothing;
      if (card.chart.stacked && dapo.data.runs.length === 1) {
        traces.push({ ...base, y: curves.smooth(line.y, weight), stackgroup: "one", line: { width: 0.5, color: colour }, fillcolor: curves.faded(colour, 0.75) });
        continue;
      }
      if (weight) traces.push({ ...base, y: line.y, line: { width: 1, color: curves.faded(colour, 0.22) } });
      traces.push({ ...base, y: weight ? curves.smooth(line.y, weight) : line.y, line: { width: line.isFirst ? 2 : 1.4, color: colour, dash: line.dash } });
    }
    return traces;
  },

  // "#rrggbb" with an opacity.
  faded(colour, opacity) {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${opacity})`;
  },

  // Thousands are written short (12k); small numbers plainly.
  isLarge: (chart) => curves.cards.get(chart.id).lines.some((line) => line.y.some((v) => Math.abs(v) >= 10000)),

  layout(chart) {
    const quiet = theme.colour("muted");
    const isTouch = matchMedia("(pointer: coarse)").matches;
    const lines = curves.showPaper && chart.lines ? chart.lines : [];
    const axis = { zeroline: false, ticks: "", tickfont: { size: 11, color: quiet }, automargin: false };
    return {
      height: 200, margin: { l: 46, r: 10, t: 8, b: 26 }, showlegend: false, hovermode: "x", dragmode: isTouch ? false : "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "inherit" },
      xaxis: { ...axis, gridcolor: "rgba(0,0,0,0)", nticks: 6, range: curves.range || undefined },
      yaxis: { ...axis, gridcolor: theme.colour("line"), nticks: 5, fixedrange: true, tickformat: chart.unit === "share" ? ".3~p" : curves.isLarge(chart) ? ".3~s" : ".5~g", rangemode: (chart.unit === "share" && !chart.free) || chart.stacked ? "tozero" : "normal" },
      shapes: lines.map((y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: quiet, width: 1, dash: "dash" } })),
    };
  },

  plot(card) {
    card.lines = curves.linesOf(card.chart);
    Plotly.react(card.plot, curves.traces(card), curves.layout(card.chart), { displayModeBar: false, responsive: true });
    curves.read(card, null);
    if (card.isDrawn) return;
    card.isDrawn = true;
    card.cross = el("div", { class: "cross", hidden: true });
    card.plot.append(card.cross);
    card.plot.on("plotly_hover", (event) => curves.point(event.points[0].x));
    card.plot.on("plotly_unhover", () => curves.point(null));
    card.plot.on("plotly_click", (event) => curves.click(card, event.points[0]));
    card.plot.on("plotly_relayout", (change) => curves.zoom(card, change));
  },

  redraw() {
    if (!window.Plotly) return;
    for (const card of curves.cards.values()) if (card.isDrawn) curves.plot(card);
  },

  update() {
    const isNew = allCharts().some((chart) => !curves.cards.has(chart.id) && curves.linesOf(chart).length);
    if (isNew) {
      curves.cards.clear();
      curves.draw();
    } else curves.redraw();
    behaviour.update();
  },

  // ---------------------------------------------------------------- one hover for all charts

  point(x) {
    cancelAnimationFrame(curves.frame);
    curves.frame = requestAnimationFrame(() => {
      for (const card of curves.cards.values()) {
        if (!card.isDrawn) continue;
        const axis = card.plot._fullLayout.xaxis;
        const place = x === null ? NaN : axis.l2p(x);
        card.cross.hidden = !(place >= 0 && place <= axis._length);
        card.cross.style.left = `${axis._offset + place}px`;
        curves.read(card, x);
      }
    });
  },

  // The values at x, or the last ones, next to their names: the chart's legend.
  read(card, x) {
    const cells = card.lines.filter((line) => line.run >= 0).map((line) => {
      const at = x === null ? line.x.length - 1 : curves.nearest(line.x, x);
      const value = x === null ? lastOf(line.y) : line.y[at];
      const text = card.chart.unit === "share" ? format.percent(value) : format.number(value);
      return el("span", {}, el("i", { class: "key", style: { background: `var(--${line.colour})` } }), `${line.label} `, el("b", {}, text));
    });
    const where = x === null ? null : el("span", { class: "where" }, curves.axis === "step" ? `step ${Math.round(x)}` : format.number(x));
    card.readout.replaceChildren(...cells, ...(where ? [where] : []));
  },

  nearest(xs, x) {
    let best = 0;
    for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
    return best;
  },

  zoom(from, change) {
    const isReset = change["xaxis.autorange"];
    if (!isReset && change["xaxis.range[0]"] === undefined) return;
    if (curves.isZooming) return;
    curves.isZooming = true;
    curves.range = isReset ? null : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    const moves = [...curves.cards.values()].filter((card) => card.isDrawn && card !== from).map((card) =>
      Plotly.relayout(card.plot, isReset ? { "xaxis.autorange": true } : { "xaxis.range": [...curves.range] }));
    Promise.all(moves).then(() => { curves.isZooming = false; });
  },

  // A point leads to the responses of the nearest recorded step.
  click(card, point) {
    if (card.chart.kind === "behaviour") {
      behaviour.open(card.lines[point.curveNumber], point.pointIndex);
      return;
    }
    if (curves.axis === "step") rollouts.open({ step: Math.round(point.x) });
  },
};

// ---------------------------------------------------------------- emergent behaviour

const behaviour = {
  CHART: { id: "emergent", kind: "behaviour", title: "Share of responses", unit: "share", note: "Click a point to read the responses behind it." },

  draw() {
    const section = $("behaviour");
    section.hidden = !dapo.data.runs.some((run) => run.rollouts.length);
    if (section.hidden) return;
    section.replaceChildren(
      el("h2", {}, "Emergent behaviour"),
      el("p", { class: "sub" }, "Responses that check, doubt or restart themselves, as in the paper’s case analysis: found by an editable list of phrases, and by a value that is stated again and changed."),
      el("div", { class: "behaviours" }, curves.card(behaviour.CHART), behaviour.kinds()));
  },

  kinds() {
    const run = dapo.data.runs[0];
    const last = run.rollouts[run.rollouts.length - 1];
    return el("div", { class: "kinds" }, ...dapo.data.behaviour.map(([kind, meaning], at) => {
      const counts = run.rollouts.map((r) => r.behaviour[kind] || 0);
      const most = counts.indexOf(Math.max(0, ...counts));
      return el("button", { type: "button", class: "kind", disabled: !counts.some(Boolean), onclick: () => rollouts.open({ step: run.rollouts[most].step, behaviour: kind }) },
        el("i", { class: "key", style: { background: `var(--${behaviour.HUES[at]})` } }), el("b", {}, behaviour.LABELS[kind]),
        el("span", { class: "sub" }, ` ${meaning}`),
        el("span", { class: "sub block" }, last ? `${counts[counts.length - 1]} of ${last.responses} in step ${last.step}` : "",
          counts[most] ? `; most in step ${run.rollouts[most].step}: ${counts[most]}` : ""));
    }));
  },

  HUES: ["accent", "second", "third", "fourth"],
  LABELS: { check: "Checks", doubt: "Doubts", restart: "Restarts", revised: "Revises a value" },

  lines(run, at, several) {
    if (!run.rollouts.length) return [];
    const x = run.rollouts.map((r) => curves.xAt(run, r.step));
    const line = (label, y, colour, dash, kind) => ({ label, run: at, x, y, colour, dash, isFirst: true, points: true, raw: true, kind });
    if (several) {
      const any = run.rollouts.map((r) => (r.responses ? Math.max(...Object.values(r.behaviour)) / r.responses : null));
      return [line("largest of the four", any, `run-${at}`, "solid", "doubt")];
    }
    return dapo.data.behaviour.map(([kind], k) =>
      line(behaviour.LABELS[kind], run.rollouts.map((r) => (r.responses ? r.behaviour[kind] / r.responses : null)), behaviour.HUES[k], "solid", kind));
  },

  open(line, at) {
    const run = dapo.data.runs[line.run];
    rollouts.open({ run: line.run, step: run.rollouts[at].step, behaviour: line.kind });
  },

  update() {
    const card = curves.cards.get("emergent");
    const list = document.querySelector("#behaviour .kinds");
    if (!card || !list) behaviour.draw();
    else list.replaceWith(behaviour.kinds());
  },
};

"use strict";
// The ladder's page: a dot per arm with its interval, curves over steps, updates, tokens or minutes, the table, the papers' figures.

const ladder = {
  AXES: [["step", "steps"], ["updates", "updates"], ["tokens", "generated tokens"], ["minutes", "minutes of training"]],
  axis: "step",
  ONE_LINE: { whiteSpace: "nowrap", overflowWrap: "normal" },

  show() {
    const { settings, machine } = dapo.data;
    $("head").append(
      el("h1", {}, `Ablation ladder: ${visible(settings.recipe)}`),
      el("p", { class: "sub" },
        `${visible(settings.budget)} for every arm, seeds ${settings.seeds.join(", ")}; avg@${dapo.data.k} on ${dapo.data.problems} held-out ` +
        `problems of ${visible(settings.eval)}; model ${visible(settings.model)}, ${settings.prompts_per_step} x ${settings.responses_per_prompt} responses per ` +
        `step, ${settings.updates_per_step} updates per step, lr ${settings.lr}, at most ${settings.max_response_tokens} tokens. ` +
        (machine.date ? `${machine.date}, ${machine.cores} cores, Python ${machine.python}, torch ${machine.torch}.` : "")),
      commandLine(visible(settings.command)),
    );
    if (dapo.data.missing.length) $("head").append(el("p", { class: "missing" }, `Not finished: ${dapo.data.missing.join(", ")}`));
    for (const note of dapo.data.notes) $("head").append(el("p", { class: "missing" }, note));
    ladder.plots();
    ladder.table();
    ladder.published();
  },

  colour: (at) => theme.colour(`run-${at % 8}`),

  layout(title, height) {
    const ink = theme.colour("ink"), line = theme.colour("line");
    return {
      height, margin: { l: 60, r: 20, t: 20, b: 50 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 13 },
      xaxis: { title: { text: title }, gridcolor: line, zeroline: false }, yaxis: { gridcolor: line, zeroline: false }, hovermode: "closest",
      legend: { orientation: "h", y: -0.25 },
    };
  },

  plots() {
    const place = $("plots");
    const dots = el("div", { id: "dots" }), curves = el("div", { id: "curves-plot" });
    place.append(
      el("h2", {}, "Late score"), el("p", { class: "sub" }, "Mean over the evaluations of the last quarter of the run, over seeds; 95 % bootstrap interval over problems and seeds."), dots,
      el("h2", {}, "Curves"), choices("against", ladder.AXES, ladder.axis, (axis) => { ladder.axis = axis; ladder.curves(); }), curves);
    const arms = [...dapo.data.arms].reverse();
    const late = arms.map((arm) => arm.late);
    const layout = ladder.layout(`avg@${dapo.data.k}`, 90 + 30 * arms.length);
    layout.margin.l = 290;
    Plotly.react(dots, [{
      type: "scatter", mode: "markers", x: late.map((l) => l.value), y: arms.map((arm) => arm.label),
      error_x: { type: "data", symmetric: false, array: late.map((l) => l.high - l.value), arrayminus: late.map((l) => l.value - l.low), color: theme.colour("soft") },
      marker: { size: 10, color: arms.map((arm) => theme.colour({ rung: "accent", control: "bad" }[arm.kind] || "second")) },
      hovertemplate: "%{y}: %{x:.3f}<extra></extra>",
    }], layout, { displayModeBar: false, responsive: true });
    ladder.curves();
  },

  curves() {
    const [, title] = ladder.AXES.find(([name]) => name === ladder.axis);
    const layout = ladder.layout(title, 420 + 12 * dapo.data.arms.length);
    layout.yaxis.title = { text: `avg@${dapo.data.k}` };
    if (dapo.data.baseline) {
      layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: dapo.data.baseline.avg, y1: dapo.data.baseline.avg, line: { color: theme.colour("soft"), dash: "dot", width: 1 } }];
    }
    Plotly.react($("curves-plot"), dapo.data.arms.map((arm, at) => ({
      type: "scatter", mode: "lines", name: arm.label, x: arm.curve.map((p) => p[ladder.axis]), y: arm.curve.map((p) => p.avg),
      line: { color: ladder.colour(at), width: 2, dash: at < 8 ? "solid" : at < 16 ? "dash" : "dot" },
      hovertemplate: `%{x:,.${ladder.axis === "minutes" ? 1 : 0}f}: %{y:.3f}<extra>${arm.name}</extra>`,
    })), layout, { displayModeBar: false, responsive: true });
  },

  columns: [
    ["arm", (a) => a.label],
    ["late", (a) => `${a.late.value.toFixed(3)}`],
    ["interval", (a) => `${a.late.low.toFixed(3)} – ${a.late.high.toFixed(3)}`],
    ["end", (a) => a.end.value.toFixed(3)],
    ["best", (a) => a.best.value.toFixed(3)],
    ["difference", (a) => ladder.change(a.difference)],
    ["to", (a) => a.compared_with || ""],
    ["p", (a) => (a.difference && a.difference.p !== null ? (a.difference.p < 0.001 ? "< 0.001" : a.difference.p.toFixed(3)) : "")],
    ["over naive", (a) => ladder.change(a.over_baseline)],
    ["steps to baseline's best", (a) => (a.reaches_baseline_best ? String(a.reaches_baseline_best.step) : "not reached")],
    ["updates", (a) => (a.reaches_baseline_best ? ladder.whole(a.reaches_baseline_best.updates) : "")],
    ["tokens", (a) => (a.reaches_baseline_best ? ladder.whole(a.reaches_baseline_best.tokens) : "")],
    ["minutes", (a) => (a.reaches_baseline_best ? a.reaches_baseline_best.minutes.toFixed(1) : "")],
    ["entropy", (a) => a.entropy.toFixed(3)],
    ["length", (a) => a.length.toFixed(1)],
    ["truncated", (a) => format.percent(a.truncated)],
    ["clip", (a) => format.percent(a.clip)],
    ["waste", (a) => format.percent(a.waste)],
    ["mixed groups", (a) => format.percent(a.mixed_groups)],
  ],

  whole: (value) => Math.round(value).toLocaleString("en"),
  change: (d) => (d ? `${d.value < 0 ? "−" : "+"}${Math.abs(d.value).toFixed(3)} [${d.low.toFixed(3)}, ${d.high.toFixed(3)}]` : ""),

  table() {
    const head = el("tr", {}, ...ladder.columns.map(([name]) => el("th", {}, name)));
    const rows = dapo.data.arms.map((arm) => el("tr", {}, ...ladder.columns.map(([, show]) => el("td", { style: ladder.ONE_LINE }, show(arm)))));
    $("table").append(
      el("h2", {}, "Table"),
      el("p", { class: "sub" }, "Differences are those of the late score, paired by seed and problem. ", ...Object.entries(dapo.data.columns).map(([name, text]) => `${name}: ${text}. `)),
      el("div", { style: { overflowX: "auto" } }, el("table", { class: "table" }, el("thead", {}, head), el("tbody", {}, ...rows))));
  },

  published() {
    const arms = dapo.data.arms.filter((arm) => Object.keys(arm.published).length);
    if (!arms.length) return;
    const sources = Object.keys(dapo.data.sources);
    const head = el("tr", {}, el("th", {}, "arm"), el("th", {}, "here, late"), ...sources.map((name) => el("th", {}, name)));
    const rows = arms.map((arm) => el("tr", {}, el("td", {}, arm.label), el("td", {}, (100 * arm.late.value).toFixed(1)),
      ...sources.map((name) => el("td", {}, arm.published[name] === undefined ? "" : String(arm.published[name])))));
    $("published").append(
      el("h2", {}, "What the papers report"),
      el("p", { class: "sub" }, "AIME 2024 avg@32 in percent, Qwen2.5-32B base: another model, task and scale; only the order can be compared. ",
        ...sources.map((name) => `${name}: ${dapo.data.sources[name]}. `)),
      el("div", { style: { overflowX: "auto" } }, el("table", { class: "table" }, el("thead", {}, head), el("tbody", {}, ...rows))));
  },
};

ladder.show();
document.body.dataset.ready = "";

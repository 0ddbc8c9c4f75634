"use strict";
// The top of the page: which run this is, did it learn, what the doctor found; and the tables at the bottom.

const overview = {
  draw() {
    const section = $("overview");
    section.replaceChildren(
      ...dapo.data.runs.map((run, at) => overview.run(run, at, dapo.data.runs.length)),
      ...(dapo.data.differences || []).map((difference, at) => overview.difference(difference, at + 1)));
    overview.flips();
    overview.record();
  },

  run(run, at, n) {
    return el("article", { class: "run" },
      overview.heading(run, at, n),
      overview.score(run),
      ...run.missing.map((text) => el("p", { class: "missing" }, "Missing: ", text)),
      n === 1 ? el("div", { class: "answers" }, ...run.answers.map((answer) => overview.answer(answer, run))) : null,
      overview.findings(run),
      el("details", { class: "commands" },
        el("summary", {}, "Commands: resume, evaluate, export"),
        ...run.commands.map(([name, text]) => el("div", { class: "row" }, el("span", { class: "label" }, name), commandLine(text)))),
    );
  },

  heading(run, at, n) {
    const chips = [
      el("span", { class: "chip strong" }, run.preset),
      run.is_paper_algorithm ? null : el("span", { class: "chip warn" }, "not the paper’s algorithm"),
      el("span", { class: "chip" }, run.model),
      el("span", { class: "chip" }, run.data),
    ];
    const done = run.steps ? Math.min(1, run.step / run.steps) : 0;
    return el("header", { class: "heading" },
      el("h1", {}, n > 1 ? el("i", { class: "key", style: { background: `var(--run-${at})` } }) : null, run.name),
      el("div", { class: "chips" }, ...chips),
      el("div", { class: "state" },
        el("span", { class: `dot ${run.state}` }), `${run.state} · step ${run.step} of ${run.steps}`,
        el("span", { class: "progress" }, el("span", { style: { width: `${100 * done}%` } }))),
    );
  },

  // The score before and now, what it measures, whether it changed, the interval, and the best.
  score(run) {
    const verdict = el("p", { class: "verdict" },
      el("span", { class: `dot ${overview.tone(run)}` }), el("b", {}, "Doctor: "), run.verdict);
    if (run.score.to === null) return el("div", { class: "score" }, el("p", { class: "sub" }, run.score.what), verdict);
    const set = run.evaluations[0].set;
    const lines = run.evaluations.filter((line) => line.set === set);
    const best = lines.reduce((a, b) => (b.avg > a.avg ? b : a));
    const last = lines[lines.length - 1];
    const interval = (line) => `95 % interval ${line.avg_interval[0].toFixed(3)}–${line.avg_interval[1].toFixed(3)}`;
    const change = run.score.from === null ? null : run.score.to - run.score.from;
    const inAll = `${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(3)}`;
    return el("div", { class: "score" },
      el("div", { class: "figure" },
        change === null ? null : el("span", { class: "from" }, run.score.from.toFixed(3), el("span", { class: "arrow" }, " → ")),
        el("span", { class: `to ${run.score.verdict}` }, run.score.to.toFixed(3)),
        el("span", { class: "what" }, run.score.what)),
      el("p", { class: "sub" },
        change === null ? "" : el("b", { class: `learnt ${run.score.verdict}` }, `${run.score.verdict === "inconclusive" ? "Inconclusive" : run.score.verdict === "worse" ? "Worse" : "Improved"}, ${inAll}`),
        change === null ? "" : `: ${run.score.why}. `,
        `avg@${last.k} after step ${last.step}: ${interval(last)}`, best === last ? "" : `; best ${best.avg.toFixed(3)} after step ${best.step}, ${interval(best)}`,
        el("br"), `${best.problems} problems of ${set}`),
      verdict);
  },

  // A run against the first one, paired problem by problem.
  difference(difference, at) {
    const [first, run] = [dapo.data.runs[0], dapo.data.runs[at]];
    const signed = (v) => `${v < 0 ? "−" : "+"}${Math.abs(v).toFixed(3)}`;
    const row = ([step, otherStep, avg, otherAvg, value, low, high, p], place, all) => el("tr", { class: place === all.length - 1 ? "end" : "" },
      el("td", {}, step === otherStep ? `${step}` : `${step}, ${otherStep}`),
      el("td", {}, avg.toFixed(3)), el("td", {}, otherAvg.toFixed(3)),
      el("td", {}, overview.whisker(value, low, high, difference.rows)),
      el("td", {}, signed(value)), el("td", {}, `${signed(low)} to ${signed(high)}`), el("td", {}, p === null ? "–" : p < 0.001 ? "< 0.001" : p.toPrecision(2)));
    return el("article", { class: "difference" },
      el("p", { class: "question" }, "Is ", el("i", { class: "key", style: { background: `var(--run-${at})` } }), el("b", {}, run.name),
        " better than ", el("i", { class: "key", style: { background: "var(--run-0)" } }), el("b", {}, first.name), "?"),
      el("p", { class: `short ${difference.tone}` }, difference.answer),
      el("p", { class: "sub" }, difference.detail),
      difference.rows.length ? el("div", { class: "scroll" }, el("table", {},
        el("thead", {}, el("tr", {}, ...["after step", run.name, first.name, "", "difference", "95 % interval", "p"].map((text) => el("th", {}, text)))),
        el("tbody", {}, ...difference.rows.map(row)))) : null);
  },

  // A difference with its interval around zero, all rows on one scale.
  whisker(value, low, high, rows) {
    const reach = Math.max(0.01, ...rows.flatMap((row) => [Math.abs(row[5]), Math.abs(row[6])]));
    const x = (v) => 60 + (56 * v) / reach;
    const tone = low > 0 ? "good" : high < 0 ? "bad" : "";
    return svg("svg", { class: `whisker ${tone}`, viewBox: "0 0 120 16", "aria-hidden": "true" },
      svg("line", { class: "zero", x1: 60, x2: 60, y1: 0, y2: 16 }),
      svg("line", { x1: x(low), x2: x(high), y1: 8, y2: 8 }),
      svg("circle", { cx: x(value), cy: 8, r: 3.5 }));
  },

  tone(run) {
    if (run.findings.some((finding) => finding.level === "severe")) return "bad";
    if (run.findings.some((finding) => finding.level === "warning")) return "warn";
    return run.step && run.is_judged ? "good" : "";
  },

  LINKS: { learnt: "#curves", entropy: "#curves", time: "#curves", clipped: "#rollouts", waste: "#curves", prompts: "#curves", flips: "#flips", forecast: "#curves" },

  answer(answer, run) {
    const picture = answer.fractions.length ? overview.bar(answer.fractions) : overview.spark(answer.name, run);
    return el("a", {
      class: "answer", href: overview.LINKS[answer.name],
      onclick() { if (answer.name === "clipped") rollouts.showClipped(); },
    },
      el("span", { class: "question" }, answer.question),
      el("span", { class: `short ${answer.tone}` }, answer.answer),
      picture,
      el("span", { class: "detail" }, visible(answer.detail)));
  },

  bar(fractions) {
    const bar = el("span", { class: "bar-chart" });
    fractions.forEach(([label, fraction], at) => bar.append(el("span", {
      title: `${label} ${format.percent(fraction)}`, style: { flexGrow: String(fraction), opacity: String(1 - (0.86 * at) / Math.max(4, fractions.length - 1)) },
    })));
    return bar;
  },

  // A line without axes: the shape is the message, the numbers are next to it.
  spark(name, run) {
    const values = {
      learnt: run.evaluations.map((line) => line.avg),
      entropy: run.metrics["policy/entropy"],
      clipped: run.metrics["clip/high"],
    }[name];
    const points = (values || []).map((v, i) => [i, v]).filter(([, v]) => v !== null);
    if (name === "flips" || points.length < 2) return null;
    const [low, high] = [Math.min(0, ...points.map((p) => p[1])), Math.max(...points.map((p) => p[1]))];
    const last = points[points.length - 1][0] || 1;
    const place = ([x, y]) => `${(100 * x) / last},${27 - (24 * (y - low)) / (high - low || 1)}`;
    return svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("polygon", { points: `0,30 ${points.map(place).join(" ")} 100,30` }),
      svg("polyline", { points: points.map(place).join(" ") }));
  },

  findings(run) {
    if (!run.findings.length) return null;
    return el("div", { class: "findings" }, ...run.findings.map((finding) => el("details", { class: `finding ${finding.level}`, open: finding.level === "severe" },
      el("summary", {}, el("b", {}, finding.title),
        el("span", { class: "sub" }, finding.steps ? ` steps ${finding.steps[0]}–${finding.steps[1]}` : "")),
      el("p", {}, visible(finding.detail)),
      el("p", { class: "remedy" }, el("b", {}, "Remedy: "), visible(finding.remedy)))));
  },

  // ---------------------------------------------------------------- problems that flipped

  flips() {
    const section = $("flips");
    const run = dapo.data.runs.find((one) => one.flips.length);
    section.hidden = !run;
    if (!run) return;
    const table = el("div", { class: "flip-list" });
    const show = (which) => {
      const chosen = run.flips.filter((flip) => (which === "learnt" ? flip.change > 0 : which === "lost" ? flip.change < 0 : flip.change === 0));
      const shown = chosen.slice(0, 60);
      const more = run.n_flips[which] - shown.length; // the page holds the most changed ones only
      table.replaceChildren(...shown.map(overview.flip));
      if (!run.n_flips[which]) table.append(el("p", { class: "sub" }, "None."));
      else if (more) table.append(el("p", { class: "sub" }, `and ${more} more`));
    };
    section.replaceChildren(
      el("h2", {}, "Problems that flipped"),
      el("p", { class: "sub" }, `Held-out problems of ${run.flips.length ? run.evaluations[0].set : ""}, correct responses at each evaluation from left to right; the most changed first.`),
      choices("Which problems", [["learnt", "Improved"], ["lost", "Worse"], ["same", "Unchanged"]], "learnt", show),
      table);
    show("learnt");
  },

  flip(flip) {
    const strip = el("span", { class: "strip" });
    flip.correct.forEach((n, at) => strip.append(el("span", {
      title: `step ${flip.steps[at]}: ${n} of ${flip.k} correct`, style: { opacity: String(0.1 + (0.9 * n) / flip.k) },
    })));
    const counts = `${flip.correct[0]} → ${flip.correct[flip.correct.length - 1]} of ${flip.k}`;
    return el("div", { class: "flip" }, strip, el("span", { class: "count" }, counts), el("span", { class: "text" }, visible(flip.question)));
  },

  // ---------------------------------------------------------------- tables

  record() {
    const parts = [el("h2", {}, "Record")];
    for (const run of dapo.data.runs) {
      const several = dapo.data.runs.length > 1 ? `${run.name}: ` : "";
      if (run.evaluations.length) {
        const head = ["step", "set", "avg@k", "95 %", "pass@k", "maj@k", "unparseable", "truncated", "faults", "tokens"];
        const rows = run.evaluations.map((e) => [
          e.step, e.set, e.avg.toFixed(3), `${e.avg_interval[0].toFixed(3)}–${e.avg_interval[1].toFixed(3)}`, format.number(e.pass),
          e.maj === null ? "n/a" : format.number(e.maj), format.percent(e.unparseable), format.percent(e.truncated), e.faults ?? "–", format.number(e.mean_tokens)]);
        parts.push(overview.fold(`${several}Evaluations (${rows.length})`, overview.table(head, rows), true));
      }
      if (run.events.length) {
        const n = run.events.length < run.n_events ? `the last ${run.events.length} of ${run.n_events}` : run.n_events;
        parts.push(overview.fold(`${several}Events (${n})`, overview.table(["step", "kind", "message"], run.events)));
      }
      parts.push(overview.fold(`${several}Configuration`, overview.table(["key", "value"], run.config)));
    }
    const glossary = dapo.data.glossary.map(([name, unit, meaning]) => [name, unit, meaning]);
    parts.push(overview.fold("Glossary of metrics", overview.table(["metric", "unit", "meaning"], glossary)));
    $("record").replaceChildren(...parts);
  },

  fold: (title, body, isOpen = false) => el("details", { class: "fold", open: isOpen }, el("summary", {}, title), body),

  table: (head, rows) => el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((text) => el("th", {}, text)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, visible(String(cell))))))))),
};

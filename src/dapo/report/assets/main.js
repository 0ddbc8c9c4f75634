"use strict";
// Puts the page together, and keeps it up to date where it is served live.

const page = {
  draw() {
    if (!dapo.data) {
      $("overview").replaceChildren(el("p", { class: "missing" }, "Missing: report/data.js, next to this page."));
      return;
    }
    const names = dapo.data.runs.map((run) => run.name);
    document.title = `${names.join(", ")} · dapo`;
    $("brand").textContent = names.length === 1 ? names[0] : `${names.length} runs`;
    overview.draw();
    curves.draw();
    rollouts.draw();
    page.links();
    document.documentElement.dataset.ready = "";
  },

  links() {
    const titles = [["overview", "Overview"], ["curves", "Curves"], ["behaviour", "Behaviour"], ["rollouts", "Rollouts"], ["flips", "Flips"], ["record", "Record"]];
    $("links").replaceChildren(...titles.filter(([id]) => !$(id).hidden).map(([id, text]) => el("a", { href: `#${id}` }, text)));
  },

  // ---------------------------------------------------------------- live

  version: "",
  async follow() {
    const live = $("live");
    live.hidden = false;
    for (;;) {
      try {
        const version = await (await fetch("version")).text();
        if (version !== page.version) {
          const answer = await fetch("data");
          if (!answer.ok) throw new Error(await answer.text());
          const isFirst = dapo.data === null;
          dapo.data = await answer.json();
          for (const name of [...dapo.chunks.keys()]) if (name.startsWith("history")) dapo.chunks.delete(name);
          if (isFirst) page.draw();
          else page.update();
          page.version = version;
        }
        live.textContent = "live";
        live.className = "live on";
      } catch {
        live.textContent = "not connected";
        live.className = "live off";
      }
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  },

  // New numbers, without moving what the reader is looking at.
  update() {
    const open = [...document.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent.replace(/\(.*/, ""));
    overview.draw();
    for (const summary of document.querySelectorAll("details > summary")) {
      if (open.includes(summary.textContent.replace(/\(.*/, ""))) summary.parentElement.open = true;
    }
    curves.update();
    rollouts.update();
    page.links();
  },
};

curves.listen();
$("theme").addEventListener("click", theme.toggle);
// In a frame without an address of its own, a link to a section would open the page around the frame.
if (location.protocol === "about:") document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]');
  if (!link) return;
  event.preventDefault();
  document.querySelector(link.getAttribute("href")).scrollIntoView();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme.listeners.forEach((listener) => listener()));
if ("live" in document.documentElement.dataset) page.follow();
else page.draw();

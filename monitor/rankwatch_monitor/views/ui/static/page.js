// Shows the view that the address names, and keeps it up to date while the run is running.
"use strict";

const { h, where } = Views;
const REFRESH = 2000;
const main = document.getElementById("main");
const [, place, encoded, view = ""] = location.pathname.split("/");
const run = encoded && decodeURIComponent(encoded);
const query = new URLSearchParams(location.search);
const TITLES = { "": "Overview", verdict: "Verdict", modules: "Modules", chart: "Chart", diff: "Diff", events: "Events" };

function trouble(text) {
  const place = document.getElementById("trouble");
  place.textContent = text;
  place.hidden = !text;
}

async function ask(path, known) {
  const answer = await fetch(path, { headers: known ? { "If-None-Match": known } : {}, cache: "no-store" });
  if (answer.status === 304) return { known };
  const body = await answer.json().catch(() => ({ error: `${answer.status} ${answer.statusText}` }));
  if (!answer.ok) throw new Error(body.error);
  return { known: answer.headers.get("ETag"), body };
}

// Asks at once and then every REFRESH ms; calls ``show`` with every answer that has changed.
async function follow(path, show) {
  let known = null;
  for (;;) {
    if (!document.hidden || known === null) {
      try {
        const answer = await ask(path, known);
        trouble("");
        if (answer.body !== undefined) show(answer.body);
        known = answer.known;
      } catch (error) {
        trouble(error instanceof TypeError ? "no answer from rankwatch ui; trying again" : error.message);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, REFRESH));
  }
}

const api = (name, parameters) => `/api/run/${encodeURIComponent(run)}/${name}?${new URLSearchParams(parameters || {})}`;
const chosen = (...names) => Object.fromEntries(names.filter((name) => query.get(name)).map((name) => [name, query.get(name)]));
const part = (title) => { const section = h("section", null, h("h2", null, title)); main.append(section); return section; };
const slot = () => { const place = h("div"); main.append(place); return place; };

function head() {
  const links = run ? h("nav", { "aria-label": "Views of this run" }, Object.entries(TITLES).map(([name, title]) => h("a", { href: where(run, name), "aria-current": name === view ? "page" : null }, title))) : null;
  document.getElementById("head").append(h("a", { class: "brand", href: "/" }, "rankwatch"), links || "");
  document.title = run ? `${run}: ${TITLES[view].toLowerCase()} - rankwatch` : "rankwatch";
}

function field(name, label, kind, more) {
  return h("label", { class: kind === "long" ? "wide" : null }, label, h("input", { name, class: kind, value: query.get(name) || "", ...more }));
}

// What the cells of a grid hold: without a choice it goes by the dtypes.
function measure() {
  const options = [["", "by its dtype"], ["headroom", "headroom"], ["change", "change"]];
  const select = h("select", { name: "measure" }, options.map(([value, text]) => h("option", { value, selected: value === (query.get("measure") || "") }, text)));
  select.addEventListener("change", () => select.form.requestSubmit());
  return h("label", null, "cells show", select);
}

function form(...fields) {
  main.append(h("form", { method: "get" }, fields, h("button", null, "Show")));
}

// Empty fields are left out of the address. The overview has several forms: each keeps what the others say. Modules round a batch
// stay so, unless other batches are asked for.
document.addEventListener("submit", (event) => {
  event.preventDefault();
  const fields = [...new FormData(event.target)];
  const asks = ([name]) => fields.some(([own, value]) => own === name && value !== "");
  const stays = view ? ([name]) => name === "around" && !asks(["from"]) && !asks(["to"]) : ([name]) => !fields.some(([own]) => own === name);
  const others = run ? [...query].filter(stays) : [];
  location.search = new URLSearchParams([...fields, ...others].filter(([, value]) => value !== "")).toString();
});

// From a verdict to what it rests on.
function links({ report: { verdict }, has_diff }) {
  if (!verdict) return [];
  const modules = where(run, "modules", { ...(verdict.rank === null ? {} : { rank: verdict.rank, around: verdict.batch }) });
  return [...(view === "verdict" ? [] : [Views.link(where(run, "verdict"), "What led to it")]), Views.link(modules, "Its modules, batch by batch"), ...(has_diff ? [Views.link(where(run, "diff"), "Its batch beside the last good one")] : [])];
}

const span = (grid, column) => ({ from: grid.first + column * grid.step, to: grid.first + (column + 1) * grid.step - 1 });

const PAGES = {
  list: () => Runs.list(),

  compare: () => Runs.compare(),

  overview() {
    const model = h("span", { class: "class" });
    main.append(h("h1", null, `${run} `, model));
    const [state, found, loss, heat, noticed, others, table] = Array.from({ length: 7 }, slot);
    const curves = Runs.curves(loss, others);
    const draw = Charts.folded(heat, "rank", query.has("measure"), (row, column, grid) => {
      const { from, to } = span(grid, column);
      location.assign(where(run, "modules", { rank: grid.rows[row], around: from === to ? from : `${from}-${to}`, ...chosen("measure") }));
    }, h("form", { method: "get" }, measure()));
    follow(api("overview", chosen("measure")), (body) => {
      const { report } = body;
      model.textContent = body.model;
      state.replaceChildren(Views.summary(body, Views.link(`/compare?${new URLSearchParams({ run })}`, "compare with another run")), report.measured ? h("p", { class: "faint" }, `Measured in full: ${report.measured}`) : "", body.silent_collector ? h("p", null, "The collector has been silent for more than three heartbeats.") : "");
      found.replaceChildren(...[Views.stall(report), Views.collectives(report), Views.verdict(report, { links: links(body) }), Views.skipped(report), Views.replicas(body.replicas)].filter(Boolean));
      draw(body.grid, Views.marks(body.order));
      curves(body.grid);
      noticed.replaceChildren(...[body.standing && body.standing.waiting && h("p", { class: "panel" }, body.standing.waiting), !body.is_over && Views.doubts(report) && h("p", { class: "panel" }, Views.judgement(report)), Views.gaps(report), Views.notices(report)].filter(Boolean));
      table.replaceChildren(h("h2", null, "Ranks"), Views.ranks(run, report, body), body.replicas.compared ? h("p", { class: "faint" }, `Replicas were ${body.replicas.compared}.`) : "");
    });
  },

  verdict() {
    main.append(h("h1", null, `${run}: verdict`));
    const [place, led] = [slot(), slot()];
    const chart = part("The culprit's reading over the batches");
    chart.hidden = true;
    const draw = Charts.lines(chart);
    const table = slot();
    let asked = false;
    follow(api("overview"), (body) => {
      const { report } = body;
      if (!report.verdict) {
        const said = Views.replicas(body.replicas);
        place.replaceChildren(...[said, h("p", null, body.is_over ? `The run is over (${report.outcome}): no inf or nan was ${report.ranks.some((row) => row.farewell) ? "reported, but it was not watched to its end" : report.gaps.length ? "reported, but not all of it is on record" : "found"}. ${report.reason}` : "No inf or nan so far.")].filter(Boolean));
        return;
      }
      place.replaceChildren(Views.verdict(report, { links: links(body), isOpen: true }));
      led.replaceChildren(Views.chain(report, body.path));
      table.replaceChildren(Views.lastFrames(report, body.path));
      if (asked) return;
      asked = true;
      ask(api("culprit")).then(({ body }) => {
        chart.hidden = !body;
        if (body) draw(body);
      }, (error) => trouble(error.message));
    });
  },

  modules() {
    const asked = query.get("rank") || "";
    let rank = asked;
    const title = h("h1", null, `${run}: modules`);
    main.append(title);
    form(field("rank", "rank (none: all)", "short", { inputmode: "numeric" }), field("from", "from batch", "short", { inputmode: "numeric" }), field("to", "to batch", "short", { inputmode: "numeric" }), field("match", "modules whose name has", "long"), measure());
    const note = slot();
    const place = part("Headroom by module and batch");
    const hidden = h("p", { class: "faint" });
    const draw = Charts.heatmap(place, "module", (row, column, grid) => {
      const [module, phase] = grid.keys[row];
      location.assign(where(run, "chart", { module, phase, label: phase === "backward" ? "grad_output" : "output", ranks: rank ? `all,${rank}` : "all" }));
    });
    place.append(hidden);
    follow(api("modules", chosen("rank", "around", "from", "to", "match", "measure")), (grid) => {
      rank = grid.rank === undefined ? asked : grid.rank === null ? "" : String(grid.rank);
      title.textContent = `${run}: modules, ${rank ? `rank ${rank}` : "over all ranks"}${query.get("around") ? `, round batch ${query.get("around")}` : ""}`;
      if (query.get("around")) document.querySelector("input[name=rank]").value = rank;
      place.querySelector("h2").textContent = Charts.heading(grid, "module");
      note.textContent = grid.note;
      hidden.textContent = grid.hidden ? `These modules are the nearest to overflow; ${grid.hidden} more are farther away.` : "";
      draw(grid);
    });
  },

  chart() {
    main.append(h("h1", null, `${run}: a reading over the batches`));
    const modules = h("datalist", { id: "modules" });
    const labels = h("datalist", { id: "labels" });
    const phase = h("select", { name: "phase" }, ["forward", "recompute", "backward"].map((name) => h("option", { value: name, selected: name === (query.get("phase") || "forward") }, name)));
    form(field("module", "module (none: the root)", "long", { list: "modules" }), field("label", "reading", "short", { list: "labels", placeholder: "output" }), h("label", null, "phase", phase), field("ranks", "ranks, such as all,0,3", "short", { placeholder: "all" }), field("from", "from batch", "short", { inputmode: "numeric" }), field("to", "to batch", "short", { inputmode: "numeric" }), modules, labels);
    const draw = Charts.lines(part(`${Views.module(query.get("module"))}, ${query.get("label") || "output"}`));
    ask(api("readings")).then(({ body }) => {
      modules.append(...Array.from(new Set(body.map((each) => each.module)), (name) => h("option", { value: name })));
      const known = body.find((each) => each.module === (query.get("module") || "") && each.phase === phase.value);
      labels.append(...(known ? known.labels : []).map((name) => h("option", { value: name })));
    }, (error) => trouble(error.message));
    follow(api("series", { module: query.get("module") || "", ...chosen("label", "phase", "ranks", "from", "to") }), draw);
  },

  diff() {
    main.append(h("h1", null, `${run}: two batches side by side`));
    const [ranks, batches] = [query.getAll("rank"), query.getAll("batch")];
    const twice = (name, label, values) => [0, 1].map((index) => field(name, `${label}${index ? " on the right" : " on the left"}`, "short", { value: values[index] || "", inputmode: "numeric" }));
    form(twice("rank", "rank", ranks), twice("batch", "batch", batches), field("other", "other run (none: this one)", "short"));
    const place = slot();
    const [rank, batch] = [[...new Set(ranks)], [...new Set(batches)]];
    const tellStored = (of) => ask(api("stored", { rank: of })).then(({ body }) => place.append(h("p", { class: "faint" }, body.length ? `${body.length} batches of rank ${of} are stored as it sent them, from ${body[0]} to ${body.at(-1)}.` : `No batch of rank ${of} is stored as it sent it.`)), (error) => trouble(error.message));
    const asked = new URLSearchParams([...rank.map((value) => ["rank", value]), ...batch.map((value) => ["batch", value]), ...(query.get("other") ? [["other", query.get("other")]] : [])]);
    ask(`/api/run/${encodeURIComponent(run)}/diff?${asked}`).then(({ body }) => {
      // The sides that were chosen, so that they can be changed.
      for (const name of ["rank", "batch"]) document.querySelectorAll(`input[name=${name}]`).forEach((input, side) => { input.value = body[name === "rank" ? "ranks" : "batches"][side]; });
      if (!ranks.length && !batches.length && !query.get("other")) place.append(h("p", null, Views.chosenSides(body)));
      place.append(Views.diff(body));
      tellStored(body.ranks[0]);
    }, (error) => {
      trouble(error.message);
      if (rank.length || query.get("other")) tellStored(rank[0] || 0);
    });
  },

  events() {
    main.append(h("h1", null, `${run}: events`));
    const place = slot();
    follow(api("events"), (body) => place.replaceChildren(Views.events(body)));
  },
};

head();
PAGES[run ? view || "overview" : place || "list"]();

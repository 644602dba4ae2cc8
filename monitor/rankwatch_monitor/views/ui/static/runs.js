// The table of runs, two runs compared over all batches, and the curves of one run.
"use strict";

const Runs = (() => {
  const SORTS = {
    began: ["began", (run) => -run.began], run: ["run", (run) => run.run], state: ["state", (run) => run.state || "unreadable"],
    ranks: ["ranks", (run) => -(run.world_size || 0)], batches: ["batches", (run) => -(run.batches || 0)],
    took: ["took", (run) => -((run.ended || 0) - run.began)], rate: ["rate", (run) => -(run.rate || 0)],
  };
  const HEAD = [["run", "name", "run"], ["state", null, "state"], ["ranks", "number", "ranks"], ["batches", "number", "batches"], ["batches/s", "number", "rate"], ["loss", "spark"], ["began", "time", "began"], ["took", "number", "took"], ["why", "text"]];

  const took = (run) => (run.ended > run.began ? Views.length(run.ended - run.began) : "-");

  const why = (run) => run.stalled || run.judged || run.reason;

  // What the table shows of a run, by its head.
  const cells = (run) => (run.unreadable ? [Views.cell(run.run, "name", "run"), Views.badge(run), "", "", "", "", Views.brief(run.began), "", run.unreadable]
    : [Views.cell(h("span", null, Views.link(where(run.run), run.run), " ", h("span", { class: "class" }, run.model)), "name", "run"), h("span", { class: "chips" }, Views.badge(run), Views.chip(run.cause)), run.world_size, run.batches, Views.rate(run.rate), Views.sparks(run.losses), Views.brief(run.began), took(run), why(run) && h("div", { class: "clamp", title: why(run) }, why(run))]);

  function worth(run, { text, state }) {
    const words = [run.run, run.job, run.state, run.cause, run.stalled, run.reason, run.unreadable].filter(Boolean).join(" ").toLowerCase();
    return (!state || (run.state || "unreadable") === state) && text.toLowerCase().split(/\s+/).every((word) => words.includes(word));
  }

  function sorted(runs, { sort, up }) {
    const key = SORTS[sort][1];
    const found = [...runs].sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : b.began - a.began));
    return up ? found.reverse() : found;
  }

  // The filter, the order and the two runs that are to be compared; all but the last are in the address.
  function list() {
    main.append(h("h1", null, "Runs"));
    const folder = h("p", { class: "faint" });
    const wanted = { text: query.get("text") || "", state: query.get("state") || "", sort: SORTS[query.get("sort")] ? query.get("sort") : "began", up: query.has("up") };
    const text = h("input", { class: "long", type: "search", value: wanted.text, placeholder: "a name, a state, a module, a cause" });
    const state = h("select", null);
    const sort = h("select", null, Object.entries(SORTS).map(([name, [title]]) => h("option", { value: name, selected: name === wanted.sort }, title)));
    const compare = h("button", { type: "button", disabled: true }, "Compare two");
    const count = h("p", { class: "faint", "aria-live": "polite" });
    const filter = h("form", { role: "search" }, h("label", { class: "wide" }, "only runs with", text), h("label", null, "state", state), h("label", null, "sorted by", sort), compare);
    main.append(folder, filter, count);
    const place = slot();
    const chosen = new Set();
    let runs = [];

    function show() {
      const kept = { ...(wanted.text && { text: wanted.text }), ...(wanted.state && { state: wanted.state }), ...(wanted.sort !== "began" && { sort: wanted.sort }), ...(wanted.up && { up: "" }) };
      history.replaceState(null, "", `/${Object.keys(kept).length ? `?${new URLSearchParams(kept)}` : ""}`);
      const found = sorted(runs.filter((run) => worth(run, wanted)), wanted);
      filter.hidden = !runs.length;
      count.textContent = runs.length ? `${found.length} of ${runs.length} runs` : "";
      sort.value = wanted.sort;
      compare.disabled = chosen.size !== 2;
      place.replaceChildren(runs.length ? rows(found) : h("p", null, "No run is recorded here yet. Start one with ", h("code", null, "rankwatch run -- torchrun ..."), "; it appears here by itself."));
    }

    // Names and states begin with A; of numbers the largest stands first.
    const rises = () => ["run", "state"].includes(wanted.sort) !== wanted.up;

    function by(name) {
      wanted.up = wanted.sort === name && !wanted.up;
      wanted.sort = name;
      show();
    }

    function rows(found) {
      const head = HEAD.map(([title, kind, name]) => h("th", { class: kind, scope: "col", "aria-sort": name === wanted.sort ? (rises() ? "ascending" : "descending") : null }, name ? button(title, name) : title));
      const body = found.map((run) => {
        const choice = h("input", { type: "checkbox", "aria-label": `compare ${run.run}`, checked: chosen.has(run.run) });
        choice.addEventListener("change", () => { chosen[choice.checked ? "add" : "delete"](run.run); compare.disabled = chosen.size !== 2; });
        const made = cells(run).map((value, index) => (value instanceof HTMLTableCellElement ? value : Views.cell(value, HEAD[index][1], HEAD[index][0])));
        return h("tr", null, h("td", { class: "choice" }, run.unreadable ? null : choice), made);
      });
      return h("div", { class: "scroll" }, h("table", { class: "stacked dense", "aria-label": "Runs" }, h("thead", null, h("tr", null, h("th", { scope: "col" }), head)), h("tbody", null, body)));
    }

    function button(title, name) {
      const made = h("button", { type: "button", class: "sort" }, title, name === wanted.sort ? h("span", { "aria-hidden": "true" }, rises() ? " ▴" : " ▾") : null);
      made.addEventListener("click", () => { by(name); place.querySelector(`th[aria-sort] button`).focus(); });
      return made;
    }

    filter.addEventListener("submit", (event) => event.stopPropagation() || event.preventDefault());
    text.addEventListener("input", () => { wanted.text = text.value; show(); });
    state.addEventListener("change", () => { wanted.state = state.value; show(); });
    sort.addEventListener("change", () => { wanted.sort = sort.value; wanted.up = false; show(); });
    compare.addEventListener("click", () => location.assign(`/compare?${new URLSearchParams([...chosen].map((name) => ["run", name]))}`));
    let before = "";
    follow("/api/runs", (body) => {
      folder.textContent = body.folder;
      if (JSON.stringify(body.runs) === before) return;
      before = JSON.stringify(body.runs);
      runs = body.runs;
      const states = [...new Set(runs.map((run) => run.state || "unreadable"))].sort();
      state.replaceChildren(...["", ...states].map((name) => h("option", { value: name, selected: name === wanted.state }, name || "any")));
      show();
    });
  }

  // The curves of the run, its loss in the first place. Returns what begins to ask for them, after the rest of the page is drawn, and
  // takes the heat map whose batches are at the same places.
  function curves(first, others) {
    const pair = h("div", { class: "pair" });
    const none = h("p", { class: "faint" });
    others.append(pair, none);
    const draw = Charts.ofRun(first, pair);
    first.querySelector(".titled").append(h("form", { method: "get" }, h("input", { name: "ranks", value: query.get("ranks") || "", placeholder: "only ranks 0,3", "aria-label": "ranks with a line of their own, such as 0,3" })));
    let asks = false;
    let grid = null;

    function show(body) {
      draw(body, grid);
      none.textContent = [body.loss.length ? "" : "No loss is on record: no backward() has reached the model.", body.norm.length ? "" : "No norm of the gradients is on record: it is known after the first optimizer step, where clip_grad_norm_ runs or the gradient guard looks.", body.gradient.length ? "" : "No single gradient is on record: watch(model, gradients=True) or RANKWATCH_GRADIENTS=1 measures them."].filter(Boolean).join(" ");
    }
    return (fresh) => {
      grid = fresh;
      if (!asks) follow(api("curves", chosen("ranks")), show);
      asks = true;
    };
  }

  // Two runs over all batches: the loss, the rate, and any reading.
  function compare() {
    const names = query.getAll("run");
    main.append(h("h1", null, "Two runs over all batches"));
    const runs = h("datalist", { id: "runs" });
    const modules = h("datalist", { id: "modules" });
    const labels = h("datalist", { id: "labels" });
    const phase = h("select", { name: "phase" }, ["forward", "recompute", "backward"].map((name) => h("option", { value: name, selected: name === (query.get("phase") || "forward") }, name)));
    form([0, 1].map((index) => field("run", index ? "and" : "run", "short", { list: "runs", value: names[index] || "" })), field("module", "module (none: the root)", "long", { list: "modules" }), field("label", "reading", "short", { list: "labels", placeholder: "output" }), h("label", null, "phase", phase), runs, modules, labels);
    const facts = slot();
    ask("/api/runs").then(({ body }) => {
      runs.append(...body.runs.map((run) => h("option", { value: run.run })));
      const found = names.map((name) => body.runs.find((run) => run.run === name)).filter((run) => run && !run.unreadable);
      if (found.length) facts.append(Views.table("The two runs", HEAD.map(([title, kind]) => [title, kind]), found.map((run) => ["", cells(run)]), "stacked dense"));
    }, (error) => trouble(error.message));
    if (names.length !== 2) {
      main.append(h("p", { class: "faint" }, "Give two runs of this folder."));
      return;
    }
    const of = (name, what, parameters) => ask(`/api/run/${encodeURIComponent(name)}/${what}?${new URLSearchParams(parameters || {})}`).then(({ body }) => body);
    const failed = (error) => trouble(error.message);
    const [loss, pace] = [part("Loss"), part("Batches a second")];
    const [drawLoss, drawPace] = [Charts.curves(loss, "Loss", Charts.HOW.loss), Charts.curves(pace, "Batches a second", `The median of the ranks. ${Charts.HOW.rate}`, { isFromZero: true })];
    Promise.all(names.map((name) => of(name, "curves"))).then((found) => {
      for (const [what, section, draw] of [["loss", loss, drawLoss], ["rate", pace, drawPace]]) {
        // Of losses that take turns, each is over the same ranks: "Critic, mean of the ranks".
        const parts = (line) => line.name.split(/, (?=[^,]*$)/);
        const lines = found.flatMap((body, index) => body[what].filter((line) => parts(line).at(-1) === parts(body[what][0]).at(-1)).map((line) => ({ ...line, name: [names[index], ...parts(line).slice(0, -1)].join(", "), thin: index === 1 })));
        if (lines.length) draw(lines); else section.hidden = true;
      }
    }, failed);
    const asked = { module: query.get("module"), label: query.get("label"), phase: phase.value };
    const chart = part("A reading over all ranks");
    const draw = Charts.lines(chart);
    Promise.all(names.map((name) => of(name, "readings"))).then(async ([found, others]) => {
      modules.append(...Array.from(new Set(found.map((each) => each.module)), (name) => h("option", { value: name })));
      // Without a module and a label: the last output that both runs have.
      const same = (each) => (other) => other.module === each.module && other.phase === each.phase;
      const both = found.filter((each) => each.phase === "forward" && each.labels.includes("output") && others.some(same(each)));
      const isAsked = asked.module !== null || asked.label !== null;
      const module = isAsked ? asked.module || "" : both.length ? both.at(-1).module : "";
      const reading = { module, label: asked.label || "output", phase: asked.phase };
      const known = found.find(same(reading));
      labels.append(...(known ? known.labels : []).map((name) => h("option", { value: name })));
      chart.querySelector("h2").textContent = `${Views.module(reading.module)}, ${reading.label}, over all ranks`;
      chart.hidden = !isAsked && !both.length;
      if (chart.hidden) return;
      const series = await Promise.all(names.map((name) => of(name, "series", { ...reading, ranks: "all" })));
      draw({ ...series[0], lines: series.map((body, index) => ({ ...body.lines[0], name: names[index] })) });
    }).catch(failed);
  }

  return { list, compare, curves };
})();

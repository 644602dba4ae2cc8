// The parts of a page, made of a run's data. Text is always set as text, never as HTML.
"use strict";

const Views = (() => {
  function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return element;
  }

  // ``head`` labels the cell on a narrow page, which has no room for the head of the table.
  const cell = (value, kind, head) => h("td", { class: kind, "data-head": head }, value instanceof Node ? value : String(value));

  // ``rows`` of [class of the row, cells]; ``head`` of [title, class].
  function table(caption, head, rows, kind) {
    return h("div", { class: "scroll" }, h("table", { class: kind, "aria-label": caption },
      h("thead", null, h("tr", null, head.map(([title, of]) => h("th", { class: of, scope: "col" }, title)))),
      h("tbody", null, rows.map(([of, cells]) => h("tr", { class: of }, cells.map((value, index) => value instanceof HTMLTableCellElement ? value : cell(value, head[index][1], head[index][0])))))));
  }

  const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== "").flatMap(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
  const tiles = (pairs) => h("div", { class: "tiles" }, pairs.map(([name, value]) => h("div", null, h("b", null, value instanceof Node ? value : String(value)), h("span", null, name))));
  const lines = (text) => (text ? h("span", { class: "lines" }, text) : "");
  const DAY = { hourCycle: "h23" }; // of 24 hours, as on the terminal
  const clock = (seconds) => new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium", ...DAY });
  const length = (seconds) => {
    const [whole, minutes, hours] = [Math.round(seconds), Math.floor(seconds / 60), Math.floor(seconds / 3600)];
    if (whole < 60) return `${whole} s`;
    if (minutes < 60) return `${minutes} min ${whole % 60} s`;
    return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  };
  // The time of today, the day of this week, or the date: the whole is in the title.
  const brief = (seconds) => {
    const [then, now] = [new Date(seconds * 1000), new Date()];
    const hour = then.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", ...DAY });
    const day = then.toDateString() === now.toDateString() ? "" : now - then < 6 * 864e5 ? then.toLocaleDateString(undefined, { weekday: "short" }) : then.toLocaleDateString(undefined, { day: "numeric", month: "short", year: then.getFullYear() === now.getFullYear() ? undefined : "numeric" });
    return h("span", { title: clock(seconds) }, `${day} ${hour}`.trim());
  };
  const rate = (number) => (number === null || number === undefined ? "-" : number >= 0.1 ? `${Number(number.toPrecision(3))}/s` : `1 in ${Number((1 / number).toPrecision(3))} s`);
  const time = (seconds) => h("span", { title: clock(seconds) }, new Date(seconds * 1000).toLocaleTimeString(undefined, DAY));
  const link = (href, text) => h("a", { href }, text);
  const where = (run, view, query) => `/run/${encodeURIComponent(run)}${view ? `/${view}` : ""}${query ? `?${new URLSearchParams(query)}` : ""}`;
  const module = (name) => name || "(root)";
  const spans = (ranks) => ranks.slice(0, 8).join(", ") + (ranks.length > 8 ? ` and ${ranks.length - 8} more` : "");

  function badge(run) {
    if (run.unreadable) return h("span", { class: "badge bad" }, "cannot be read");
    if (!run.is_over) return ["unfinished", "stalled"].includes(run.state) ? h("span", { class: "badge bad" }, run.state) : h("span", { class: "badge live" }, "running");
    if (run.outcome === "finished" && run.judged) return h("span", { class: "badge so-so" }, "finished, but");
    return h("span", { class: `badge ${run.outcome === "finished" ? "good" : "bad"}` }, run.outcome);
  }

  // Why a run went well, or did not, though it has no verdict.
  const judgement = (report) => (report.judgement ? report.judgement.text : report.verdict ? "" : report.reason);
  const doubts = (report) => report.judgement && report.judgement.healthy === false;

  function verdict(report, label = "Verdict") {
    const found = report.verdict;
    if (!found) return null;
    const batch = found.eval ? `eval ${found.eval} after batch ${found.batch}` : `batch ${found.batch}`;
    const who = found.rank === null ? "no single rank"
      : found.alike_ranks.length ? `no single rank (ranks ${spans(found.alike_ranks)} of ${report.run.world_size} at once)`
      : `rank ${found.rank} of ${report.run.world_size} (${found.host}, local rank ${found.local_rank})`;
    const others = found.also.map((other) => other.rank).filter((rank) => !found.alike_ranks.includes(rank));
    return h("section", { class: "panel is-bad", "aria-label": label },
      h("h2", { style: null }, `First ${found.state}`),
      facts([
        ["began", found.began_leads ? found.began_text : ""],
        ["culprit", `${who}, ${batch}, optimizer step ${found.optimizer_step}, frame ${found.frame}${found.frames_in_batch ? ` of ${found.frames_in_batch}` : ""}`],
        ["module", `${module(found.module)} (${found.module_class})${found.phase === "forward" ? "" : `, ${found.phase}`}`],
        ["reading", `${found.reading}: ${found.state}, ${found.dtype}${found.shape.length ? `, shape ${found.shape.join(" x ")}` : ""}`],
        ["operator", lines(found.closeup_text.operator)],
        ["cause", `${found.cause}: ${found.evidence}`],
        ["recurs", found.closeup_text.recurs || ""],
        ["precision", found.closeup_text.precision || ""],
        ["close-up", found.closeup_text["close-up"] || ""],
        ["handed", found.handed || ""],
        ["began", found.began_leads ? "" : found.began_text || ""],
        ["certainty", `${found.certainty}${found.certainty === "complete" ? "" : `: ${found.reason}`}`],
        ["also", others.length ? `ranks ${spans(others)} went bad too` : ""],
        ["try", found.try || ""],
        ["replay", found.closeup_text.replay ? h("code", null, found.closeup_text.replay) : ""],
      ]));
  }

  // The steps that were left out, each with its verdict.
  function skipped(report) {
    if (!report.skipped.length) return null;
    const count = report.skipped.length + report.skipped_unkept;
    const shown = report.skipped.slice(-8).reverse();
    const hidden = count - shown.length;
    const step = (one) => h("details", null, h("summary", null, `step ${one.step}, ${one.text}`),
      verdict({ ...report, verdict: one.verdict }, `Step ${one.step}`),
      h("p", { class: "faint" }, [one.restored.length ? `Put back: ${one.restored.join(", ")}.` : "", one.of ? `${one.budget_left || "No"} more of ${one.most} in ${one.of} steps could be left out.` : "", one.stops ? `It ended the run: ${one.stops}.` : ""].filter(Boolean).join(" ")));
    return h("section", { class: "panel", "aria-label": "Steps left out" }, h("h2", null, count === 1 ? "1 step was left out" : `${count} steps were left out`), shown.map(step), hidden ? h("p", { class: "faint" }, `and ${hidden} more before: report.json has the last ${report.skipped.length}`) : null);
  }

  // The process groups whose members do not call the same.
  function collectives(report) {
    if (!report.collectives.length) return null;
    return h("section", { class: "panel is-bad", "aria-label": "Collectives" }, h("h2", null, "Collectives differ"),
      report.collectives.map((one) => h("p", null, one.text)), report.collectives_unkept ? h("p", { class: "faint" }, `and ${report.collectives_unkept} more groups`) : null);
  }

  const LIMITS = { float16: 65504, bfloat16: 3.3895313892515355e38, float32: 3.4028234663852886e38, float64: 1.7976931348623157e308, float8_e4m3fn: 448, float8_e5m2: 57344 };

  function share(reading) {
    const limit = LIMITS[reading.dtype];
    if (!limit || reading.abs_max === null) return reading.state === "finite" ? "" : reading.state;
    const part = reading.abs_max / limit;
    // On a logarithmic scale: a linear bar would stay empty until it is too late.
    const full = part > 0 ? Math.max(0, 1 + Math.log2(part) / 24) : 0;
    const fill = h("i");
    fill.style.width = `${Math.round(100 * full)}%`;
    return h("span", null, `${part >= 0.01 ? Math.round(100 * part) : part > 0 ? "< 1" : 0}% of ${reading.dtype}`, h("span", { class: "bar", "aria-hidden": "true" }, fill));
  }

  // The last frames, with the culprit at the end; the frames that led to it are marked.
  function frames(report, path) {
    const head = [["frame", "label"], ["abs min", "number"], ["abs max", "number"], ["of its dtype's largest", "number"]];
    const rows = report.frames.flatMap((frame, index) => {
      const led = path.includes(index) ? "on-path" : "";
      const title = h("td", { colspan: 4 }, `${frame.index}  ${module(frame.module)} `, h("span", { class: "class" }, frame.module_class + (frame.phase === "forward" ? "" : `, ${frame.phase}`)), led ? h("span", { class: "class" }, index === report.frames.length - 1 ? "  ← culprit" : "  ↓ leads to the culprit") : null);
      return [[`frame ${led}`, [title]], ...frame.readings.map((reading) => {
        const bad = reading.state === "inf" || reading.state === "nan";
        return [`${led} ${bad ? "is-bad" : ""}`, [reading.label, Charts.number(reading.abs_min, reading.state), Charts.number(reading.abs_max, reading.state), share(reading)]];
      })];
    });
    return table("The last frames", head, rows);
  }

  const FIRST_RANKS = 16, FIRST_ROWS = 8, MOST_MARKED = 4;

  // The ranks that charts mark: because of which the run ended, or else those with a role.
  function marks(order) {
    const causes = order.filter(([, , isCause]) => isCause);
    return (causes.length ? causes : order.filter(([, role]) => role)).slice(0, MOST_MARKED);
  }

  // ``order`` of [rank, its role, whether the run ended because of it]: the cause stands before what failed because of it.
  function ranks(run, report, { standings, order }) {
    const now = new Map(standings.map((standing) => [standing.rank, standing]));
    const furthest = report.ranks.reduce((most, row) => Math.max(most, row.last_batch), -1);
    const head = [["rank", "number"], ["role"], ["host", "name"], ["state"], ["batch", "number"], ["behind", "number"], ["phase"], ["more", "text"]];
    const hasCause = order.some(([, , isCause]) => isCause);
    const some = (shown) => table("Ranks, the culprit and those in trouble first", head, shown.map(([rank, role, isCause]) => {
      const [row, standing] = [report.ranks[rank], now.get(rank)];
      const stalled = report.stall && !row.farewell ? (report.stall.ranks.includes(rank) ? "stalled" : report.stall.waiting.includes(rank) ? "waits for a stalled rank" : "") : "";
      const more = [stalled, row.farewell_text, standing && standing.quiet ? `${standing.quiet}, ${standing.silent.toFixed(0)} s` : "", row.dropped ? `${row.dropped} batches dropped` : "", row.rival ? `refused ${row.rival}` : ""];
      return [isCause || (!hasCause && ["lost", "failed"].includes(row.state)) || stalled === "stalled" ? "is-bad" : "", [
        cell(run === null ? rank : link(where(run, "modules", { rank }), rank), "number", "rank"), role, row.host, row.state, row.last_batch < 0 ? "-" : row.last_batch,
        row.last_batch < 0 ? "-" : furthest - row.last_batch, standing ? `${standing.phase}, frame ${standing.frame}` : "", more.filter(Boolean).join("; ")]];
    }));
    const rest = order.slice(FIRST_RANKS);
    if (!rest.length) return some(order);
    const more = h("details", null, h("summary", null, `${rest.length} more ranks`));
    more.addEventListener("toggle", () => more.children.length === 1 && more.append(some(rest)));
    return h("div", null, some(order.slice(0, FIRST_RANKS)), more);
  }

  // The stall there is, or was at the end, and the stacks of its ranks. An opened stack stays open when it is drawn again.
  const opened = new Set();
  function stall(report) {
    const found = report.stall;
    if (!found) return null;
    return h("section", { class: "panel is-bad", "aria-label": "Stall" }, h("p", null, found.text), found.stacks.map((stack) => {
      const name = `rank ${stack.rank} ${stack.text}`;
      if (!stack.lines.length) return h("p", null, name);
      const details = h("details", { open: opened.has(name) }, h("summary", null, name), h("div", { class: "scroll" }, h("pre", null, stack.lines.join("\n"))));
      details.addEventListener("toggle", () => (details.open ? opened.add(name) : opened.delete(name)));
      return details;
    }), found.unasked ? h("p", { class: "faint" }, `${found.unasked} more ranks were not asked where they are.`) : null);
  }

  // The batches that are not on record, and why.
  function gaps(report) {
    return report.gaps.length ? h("ul", { class: "is-bad" }, report.gaps.slice(0, 8).map((gap) => h("li", null, gap.text))) : null;
  }

  function notices(report) {
    if (!report.notices.length) return null;
    const shown = report.notices.slice(0, 8).map((notice) => h("li", null, `rank ${notice.rank}: ${notice.text}`));
    const hidden = report.notices.length - shown.length + report.notices_unkept;
    return h("section", null, h("h2", null, "Noticed"), h("ul", null, shown), hidden ? h("p", { class: "faint" }, `and ${hidden} more: report.json has them`) : null);
  }

  // What is said of replicas: the desynced parameters, or that all were equal.
  function replicas(found) {
    if (!found.lines.length) return found.compared ? facts([["replicas", found.compared]]) : null;
    const head = [["parameter", "name"], ["ranks"], ["since step", "number"], ["equal at", "number"], ["pattern"], ["host and GPU", "name"]];
    const rows = found.rows.map((row) => ["", [row.parameter, spans(row.ranks), row.step, row.equal_at < 0 ? "never" : row.equal_at, row.pattern, `${row.host} ${row.gpu}`.trim()]]);
    const hidden = Math.max(0, rows.length - FIRST_ROWS) + found.hidden;
    return h("section", { class: "panel is-bad", "aria-label": "Desync" }, h("h2", null, "Desynced parameters"),
      h("ul", null, found.lines.slice(0, FIRST_ROWS).map((line) => h("li", null, line.text, h("div", { class: "faint" }, `try: ${line.try}`)))),
      table("Desynced parameters", head, rows.slice(0, FIRST_ROWS), "stacked"),
      hidden ? h("p", { class: "faint" }, `and ${hidden} more: report.json has them`) : null,
      found.compared ? h("p", { class: "faint" }, `In all, the replicas were ${found.compared}.`) : null);
  }

  const ASIDES = {
    bad_input: "inf or nan: an input, which may be a mask, or both sides",
    zero: "zero, or next to it, on one side",
    no_values: "integers, booleans, masks and shares of zeros",
    one_sided: "no numbers on one side",
  };

  const chosenSides = (found) => (found.ranks[0] === found.ranks[1]
    ? `Rank ${found.ranks[1]}: batch ${found.batches[1]} on the right, and on the left the last one that is stored from before it, or from before the trouble began.`
    : `Batch ${found.batches[0]} of two ranks: no earlier batch is stored.`);

  function diff(found) {
    const side = (reading) => (reading ? Charts.number(reading.abs_max, reading.state) : "-");
    const of = (pair) => cell(`${module(pair.module)} (${pair.class}${pair.phase === "forward" ? "" : `, ${pair.phase}`}${pair.call ? `, call ${pair.call}` : ""})`, "name");
    const row = (pair) => [pair.difference === "went_bad" ? "is-bad" : "", [pair.ratio === null ? "inf" : `x${pair.ratio.toPrecision(3)}`, side(pair.left), side(pair.right), of(pair), pair.label]];
    const first = found.first;
    const only = Object.entries(found.only).filter(([, count]) => count).map(([name, count]) => `${count} frames only on the ${name}`);
    const largest = found.largest.filter((pair) => !ASIDES[pair.difference]);
    const aside = found.largest.filter((pair) => ASIDES[pair.difference]);
    const counted = (shown, all) => (all.length > shown ? h("p", { class: "faint" }, `and ${all.length - shown} more`) : null);
    return h("div", null,
      facts([
        ["left", found.left], ["right", found.right], ["frames", `${found.frames.left} and ${found.frames.right}${only.length ? `; ${only.join(", ")}` : ""}`],
        ["first to differ", first ? `frame ${first.frame}, ${module(first.module)} (${first.class}), ${first.label}: ${side(first.left)} and ${side(first.right)}` : "no reading differs by more than half"],
      ]),
      largest.length ? [h("h2", null, "Readings that differ most"), h("p", { class: "faint how" }, "Each is the largest number (abs max) of a reading on both sides. First stand those that are inf or nan on one side, in the order in which they ran; then the largest ratio. The first to differ, above, is nearest to the cause."),
        table("Readings that differ most", [["ratio", "number"], ["left", "number"], ["right", "number"], ["module", "name"], ["reading"]], largest.slice(0, 200).map(row), "stacked"), counted(200, largest)] : null,
      aside.length ? h("details", { open: !largest.length }, h("summary", null, `${aside.length} more differ in a way of which a ratio says nothing`),
        table("Readings of which a ratio says nothing", [["why"], ["left", "number"], ["right", "number"], ["module", "name"], ["reading"]], aside.slice(0, 200).map((pair) => ["", [ASIDES[pair.difference], side(pair.left), side(pair.right), of(pair), pair.label]]), "stacked"), counted(200, aside)) : null);
  }

  function events(found) {
    const rows = found.events.map((event) => [["tripped", "desynced", "decided"].includes(event.kind) ? "is-bad" : "", [time(event.time), event.rank === null ? "" : event.rank, event.kind, event.text]]);
    return h("div", null, table("Events, the last first", [["time"], ["rank", "number"], ["kind"], ["what", "text"]], rows, "stacked"), found.hidden ? h("p", { class: "faint" }, `and ${found.hidden} earlier ones`) : null);
  }

  return { h, cell, table, facts, tiles, clock, brief, length, rate, link, where, module, badge, judgement, doubts, verdict, skipped, frames, ranks, marks, stall, collectives, gaps, notices, replicas, diff, chosenSides, events };
})();

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
  const cell = (value, kind, head) => h("td", { class: kind, "data-head": head instanceof Node ? "" : head }, value instanceof Node ? value : String(value));

  // ``rows`` of [class of the row, cells]; ``head`` of [title, class].
  function table(caption, head, rows, kind) {
    return h("div", { class: "scroll" }, h("table", { class: kind, "aria-label": caption },
      h("thead", null, h("tr", null, head.map(([title, of]) => h("th", { class: of, scope: "col" }, title)))),
      h("tbody", null, rows.map(([of, cells]) => h("tr", { class: of }, cells.map((value, index) => value instanceof HTMLTableCellElement ? value : cell(value, head[index][1], head[index][0])))))));
  }

  // A table without the columns of which all cells are empty.
  function filled(caption, head, rows, kind) {
    const isFilled = head.map((_, index) => rows.some(([, cells]) => cells[index] !== ""));
    const some = (list) => list.filter((_, index) => isFilled[index]);
    return table(caption, some(head), rows.map(([of, cells]) => [of, some(cells)]), kind);
  }

  const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== "").flatMap(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
  const tiles = (pairs) => h("div", { class: "tiles" }, pairs.map(([name, value]) => h("div", null, h("span", null, name), " ", h("b", null, value instanceof Node ? value : String(value)))));
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

  // Why a run ended, in a word.
  const chip = (cause) => (cause ? h("span", { class: "badge chip" }, cause.replaceAll("_", " ")) : null);

  // Details that keep what was clicked, by their ``name``, when they are drawn again. ``make`` is called when they are first open.
  const clicked = new Map();
  function fold(name, title, make, isOpen = false) {
    const made = h("details", { open: clicked.has(name) ? clicked.get(name) : isOpen }, h("summary", null, title));
    const fill = () => made.open && made.children.length === 1 && made.append(make());
    made.addEventListener("toggle", () => { if (made.isConnected) clicked.set(name, made.open); fill(); });
    fill();
    return made;
  }

  const SVG = "http://www.w3.org/2000/svg";
  function svg(tag, attributes, ...children) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  // The losses of a run as small curves, each from its least to its largest, by the logarithm if these are far apart; a dot: inf or nan.
  function sparks(losses) {
    if (!losses.some((points) => points.length > 1)) return "";
    const drawn = losses.slice(0, 2).map((points) => {
      const known = points.filter(([, value]) => value !== null);
      const [least, most] = [Math.min(...known.map(([, value]) => value)), Math.max(...known.map(([, value]) => value))];
      const scale = least > 0 && most > 10 * least ? Math.log : (value) => value;
      const y = (value) => (most > least ? 21 - (19 * (scale(value) - scale(least))) / (scale(most) - scale(least)) : 12);
      const bad = points.find(([, value]) => value === null);
      return [svg("polyline", { points: known.map(([at, value]) => `${2 + 2 * at},${y(value).toFixed(1)}`).join(" ") }), ...(bad ? [svg("circle", { cx: 2 + 2 * bad[0], cy: 3, r: 2.5 })] : [])];
    });
    const [first, last] = [losses[0][0][1], losses[0].at(-1)[1]];
    const said = (value) => (value === null ? "inf or nan" : Number(value.toPrecision(3)));
    return svg("svg", { viewBox: "0 0 100 24", class: "spark", role: "img", "aria-label": `loss ${said(first)} to ${said(last)}` }, svg("title", {}, `loss ${said(first)} → ${said(last)}`), ...drawn.flat());
  }

  function badge(run) {
    if (run.unreadable) return h("span", { class: "badge bad" }, "cannot be read");
    if (!run.is_over) return ["unfinished", "stalled"].includes(run.state) ? h("span", { class: "badge bad" }, run.state) : run.judged ? h("span", { class: "badge so-so" }, "running, but") : h("span", { class: "badge live" }, "running");
    if (run.outcome === "finished" && run.judged) return h("span", { class: "badge so-so" }, "finished, but");
    return h("span", { class: `badge ${run.outcome === "finished" ? "good" : "bad"}` }, run.outcome);
  }

  // Why a run went well, or did not, though it has no verdict.
  const judgement = (report) => (report.judgement ? report.judgement.text : report.verdict ? "" : report.reason);
  const doubts = (report) => report.judgement && report.judgement.healthy === false;

  const FEW = 130; // letters of an evidence that a telephone shows whole

  // A headline, where it is and what to do; what was clicked open stays so when it is drawn again. ``links`` stand at its end.
  function verdict(report, { label = "Verdict", links = [], isOpen = false } = {}) {
    const found = report.verdict;
    if (!found) return null;
    const batch = found.eval ? `eval ${found.eval} after batch ${found.batch}` : `batch ${found.batch}`;
    const [one, who] = found.rank === null ? ["no single rank", "no single rank"]
      : found.alike_ranks.length ? [`ranks ${spans(found.alike_ranks)} at once`, `no single rank (ranks ${spans(found.alike_ranks)} of ${report.run.world_size} at once)`]
      : [`rank ${found.rank}`, `rank ${found.rank} of ${report.run.world_size} (${found.host}, local rank ${found.local_rank})`];
    const others = found.also.map((other) => other.rank).filter((rank) => !found.alike_ranks.includes(rank));
    const [operator, ...inputs] = (found.closeup_text.operator || "").split("\n");
    return h("section", { class: "panel is-bad", "aria-label": label },
      h("h2", null, `First ${found.state}: ${one}, ${batch} `, chip(found.cause)),
      h("p", { class: "clamp" }, found.evidence),
      facts([
        ["began", found.began_leads ? found.began_text : ""],
        ["where", lines([`${module(found.module)} (${found.module_class})${found.phase === "forward" ? "" : `, ${found.phase}`}, ${found.reading}`, operator].filter(Boolean).join("\n"))],
        ["do", found.try || ""],
      ]),
      fold(`${label} in full`, "all that is known", () => facts([
        ["culprit", `${who}, ${batch}, optimizer step ${found.optimizer_step}, frame ${found.frame}${found.frames_in_batch ? ` of ${found.frames_in_batch}` : ""}`],
        ["reading", `${found.reading}: ${found.state}, ${found.dtype}${found.shape.length ? `, shape ${found.shape.join(" x ")}` : ""}`],
        ["inputs", lines(inputs.map((line) => line.trim()).join("\n"))],
        ["cause", found.evidence.length > FEW ? `${found.cause}: ${found.evidence}` : ""],
        ["recurs", found.closeup_text.recurs || ""],
        ["precision", found.closeup_text.precision || ""],
        ["close-up", found.closeup_text["close-up"] || ""],
        ["handed", found.handed || ""],
        ["began", found.began_leads ? "" : found.began_text || ""],
        ["certainty", `${found.certainty}${found.certainty === "complete" ? "" : `: ${found.reason}`}`],
        ["also", others.length ? `ranks ${spans(others)} went bad too` : ""],
        ["replay", found.closeup_text.replay ? h("code", null, found.closeup_text.replay) : ""],
      ]), isOpen),
      links.length ? h("p", { class: "links" }, links) : null);
  }

  // The steps that were left out, each with its verdict.
  function skipped(report) {
    if (!report.skipped.length) return null;
    const count = report.skipped.length + report.skipped_unkept;
    const shown = report.skipped.slice(-8).reverse();
    const hidden = count - shown.length;
    const step = (one) => fold(`step ${one.step}`, `step ${one.step}, ${one.text}`, () => h("div", null,
      verdict({ ...report, verdict: one.verdict }, { label: `Step ${one.step}` }),
      h("p", { class: "faint" }, [one.restored.length ? `Put back: ${one.restored.join(", ")}.` : "", one.of ? `${one.budget_left || "No"} more of ${one.most} in ${one.of} steps could be left out.` : "", one.stops ? `It ended the run: ${one.stops}.` : ""].filter(Boolean).join(" "))));
    return h("section", { class: "panel", "aria-label": "Steps left out" }, h("h2", null, count === 1 ? "1 step was left out" : `${count} steps were left out`), shown.map(step), hidden ? h("p", { class: "faint" }, `and ${hidden} more before: report.json has the last ${report.skipped.length}`) : null);
  }

  // The process groups whose members do not call the same, but for those that the stall's text names.
  function collectives(report) {
    const rest = report.collectives.filter((one) => !(report.stall && report.stall.text.includes(one.text)));
    if (!rest.length) return null;
    return h("section", { class: "panel is-bad", "aria-label": "Collectives" }, h("h2", null, "Collectives differ"),
      rest.map((one) => h("p", null, one.text)), report.collectives_unkept ? h("p", { class: "faint" }, `and ${report.collectives_unkept} more groups`) : null);
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

  // The frames that led to the culprit, from the culprit back: what went in each came out of the next one.
  const RAN_BEFORE = 3; // frames
  function chain(report, path) {
    if (!path.length) return "";
    const led = [...path].reverse();
    // Where the chain ends at once, what went in was made outside of a module: by what ran right before, as a rule.
    const before = led.length > 1 ? [] : report.frames.slice(Math.max(0, path[0] - RAN_BEFORE), path[0]).reverse();
    const shown = [...led.map((index) => report.frames[index]), ...before];
    const largest = (frame, kinds) => frame.readings.filter((reading) => kinds.test(reading.label) && reading.abs_max !== null).sort((a, b) => b.abs_max - a.abs_max)[0];
    return h("section", null, h("h2", null, "What led to it"), h("ol", { class: "chain" }, shown.map((frame, index) => {
      const bad = frame.readings.find((reading) => ["inf", "nan"].includes(reading.state));
      const out = (index === 0 && bad) || largest(frame, /^(output|grad_input)/) || frame.readings.at(-1);
      const into = largest(frame, /^(input|grad_output)/);
      const said = (reading) => h("span", { class: "reading" }, `${reading.label} `, h("b", null, Charts.number(reading.abs_max, reading.state)), " ", ["inf", "nan"].includes(reading.state) ? null : share(reading));
      return h("li", { class: index === 0 ? "is-bad" : index < led.length ? null : "faint" },
        h("div", null, module(frame.module), h("span", { class: "class" }, ` ${frame.module_class}${frame.phase === "forward" ? "" : `, ${frame.phase}`}, frame ${frame.index}`), index === 0 ? h("span", { class: "class" }, " ← culprit") : index < led.length ? null : h("span", { class: "class" }, ", ran before")),
        h("div", null, out ? said(out) : null, into && into !== out && index === led.length - 1 ? said(into) : null));
    })));
  }

  // Folded where the chain has said what matters.
  const lastFrames = (report, path) => fold("frames", `The last ${report.frames.length} frames, as the report prints them`, () => h("div", null, h("p", { class: "faint" }, "Read from the bottom up. The marked frames lead to the culprit: the output of each is an input of the next."), frames(report, path)));

  const FIRST_RANKS = 16, FIRST_ROWS = 8, MOST_MARKED = 4;

  // How a run is, and how far: what stands below its name. ``more`` ends it.
  function summary({ report, is_over, began, ended, replicas }, ...more) {
    const states = report.ranks.reduce((sum, row) => ({ ...sum, [row.state]: (sum[row.state] || 0) + 1 }), {});
    const isTold = is_over && !report.verdict && !report.stall && !replicas.lines.some((line) => line.text === report.reason);
    const told = isTold && judgement(report);
    return h("div", { class: "summary" },
      badge({ is_over, outcome: report.outcome, state: report.stall ? "stalled" : "", judged: doubts(report) }), told ? h("span", { class: "told" }, told) : null,
      tiles([["ranks", report.run.world_size], ...(Object.keys(states).length > 1 ? Object.entries(states) : []), ["batches", report.batches], ["began", brief(began)], ...(ended > began ? [["took", length(ended - began)]] : [])]), more);
  }

  // The ranks that charts mark: because of which the run ended, or else those with a role.
  function marks(order) {
    const causes = order.filter(([, , isCause]) => isCause);
    return (causes.length ? causes : order.filter(([, role]) => role)).slice(0, MOST_MARKED);
  }

  // Where the time of a rank's batches goes: its medians as parts of a bar, which is as long as that of the slowest rank at most.
  const PARTS = ["between", "forward", "backward", "step"];
  const partsHead = () => h("span", { class: "parts" }, "a batch takes: ", PARTS.map((name) => [h("i", { class: name }), ` ${name} `]));
  const whole = (spent) => spent.reduce((sum, part) => sum + part, 0);
  const seconds = (number) => (number >= 1 ? `${Number(number.toPrecision(3))} s` : `${Number((1000 * number).toPrecision(3))} ms`);
  function parts(spent, longest) {
    if (!spent) return "";
    const said = PARTS.map((name, index) => `${name} ${seconds(spent[index])}`).join(", ");
    const bar = h("span", { class: "bar parts", role: "img", "aria-label": said }, spent.map((part, index) => {
      const fill = h("i", { class: PARTS[index] });
      fill.style.width = `${(100 * part) / longest}%`;
      return fill;
    }));
    return cell(h("span", { title: said }, bar, ` ${seconds(whole(spent))}`), "time", "a batch takes");
  }

  const GIB = 2 ** 30;
  const gib = (size) => `${Number((size / GIB).toPrecision(3))} GiB`;
  const memory = (standing) => standing.leak || [standing.memory && `memory ${gib(standing.memory)}`, standing.device_memory && `of its device ${gib(standing.device_memory)}`].filter(Boolean).join(", ");

  // ``order`` of [rank, its role, whether the run ended because of it]: the cause stands before what failed because of it.
  function ranks(run, report, { standings, order, spent }) {
    const longest = Math.max(0, ...Object.values(spent).map(whole));
    const now = new Map(standings.map((standing) => [standing.rank, standing]));
    const furthest = report.ranks.reduce((most, row) => Math.max(most, row.last_batch), -1);
    const head = [["rank", "number"], ["role"], ["host", "name"], ["state"], ["batch", "number"], ["behind", "number"], ["phase"], [partsHead()], ["more", "text"]];
    const hasCause = order.some(([, , isCause]) => isCause);
    const some = (shown) => filled("Ranks, the culprit and those in trouble first", head, shown.map(([rank, role, isCause]) => {
      const [row, standing] = [report.ranks[rank], now.get(rank)];
      const stalled = report.stall && !row.farewell ? (report.stall.ranks.includes(rank) ? "stalled" : report.stall.waiting.includes(rank) ? "waits for a stalled rank" : "") : "";
      const more = [stalled, row.farewell_text, standing && standing.quiet ? `${standing.quiet}, ${standing.silent.toFixed(0)} s` : "", row.dropped ? `${row.dropped} batches dropped` : "", row.rival ? `refused ${row.rival}` : "", standing && memory(standing)];
      return [isCause || (!hasCause && ["lost", "failed"].includes(row.state)) || stalled === "stalled" ? "is-bad" : "", [
        cell(run === null ? rank : link(where(run, "modules", { rank }), rank), "number", "rank"), role, row.host, row.state, row.last_batch < 0 ? "-" : row.last_batch,
        row.last_batch < 0 ? "-" : furthest - row.last_batch, standing ? `${standing.phase}, frame ${standing.frame}` : "", parts(spent[rank], longest), more.filter(Boolean).join("; ")]];
    }), "stacked dense");
    const rest = order.slice(FIRST_RANKS);
    if (!rest.length) return some(order);
    return h("div", null, some(order.slice(0, FIRST_RANKS)), fold("ranks", `${rest.length} more ranks`, () => some(rest)));
  }

  // The stall there is, or was at the end, and the stacks of its ranks.
  function stall(report) {
    const found = report.stall;
    if (!found) return null;
    return h("section", { class: "panel is-bad", "aria-label": "Stall" },
      h("h2", null, `Stalled: ${found.ranks.length === 1 ? "rank" : "ranks"} ${spans(found.ranks)}${found.waiting.length ? `, and ${found.waiting.length} ${found.waiting.length === 1 ? "waits" : "wait"}` : ""}`), h("ul", null, found.text.split("; ").map((part) => h("li", null, part))), found.stacks.map((stack) => {
      const name = `rank ${stack.rank} ${stack.text}`;
      return stack.lines.length ? fold(name, name, () => h("div", { class: "scroll" }, h("pre", null, stack.lines.join("\n")))) : h("p", null, name);
    }), found.unasked ? h("p", { class: "faint" }, `${found.unasked} more ranks were not asked where they are.`) : null);
  }

  // The batches that are not on record, and why.
  function gaps(report) {
    return report.gaps.length ? h("ul", { class: "is-bad" }, report.gaps.slice(0, 8).map((gap) => h("li", null, gap.text))) : null;
  }

  const FIRST_NOTICES = 3;
  function notices(report) {
    if (!report.notices.length) return null;
    const list = (some) => h("ul", null, some.map((notice) => h("li", null, `rank ${notice.rank}: ${notice.text}`)));
    const [first, rest] = [report.notices.slice(0, FIRST_NOTICES), report.notices.slice(FIRST_NOTICES)];
    return h("section", null, h("h2", null, "Noticed"), list(first), rest.length ? fold("notices", `${rest.length} more`, () => list(rest)) : null, report.notices_unkept ? h("p", { class: "faint" }, `and ${report.notices_unkept} that were not kept`) : null);
  }

  // The parameters that are not what they must be.
  function replicas(found) {
    if (!found.lines.length) return null;
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

  return { h, cell, table, facts, tiles, chip, fold, sparks, chain, clock, brief, length, rate, link, where, module, badge, judgement, doubts, summary, verdict, skipped, lastFrames, ranks, marks, stall, collectives, gaps, notices, replicas, diff, chosenSides, events };
})();

// A run in one file, to attach to a ticket: the file contains all of its data.
"use strict";

const { h } = Views;
const { overview, modules, series, curves } = JSON.parse(document.getElementById("data").textContent);
const { report } = overview;
const main = document.getElementById("main");
const part = (title) => { const section = h("section", null, h("h2", null, title)); main.append(section); return section; };
const slot = () => { const place = h("div"); main.append(place); return place; };

main.append(
  h("h1", null, `${report.run.id} `, h("span", { class: "class" }, overview.model)),
  Views.summary(overview),
  ...[Views.stall(report), Views.collectives(report), Views.verdict(report, { isOpen: true }), Views.skipped(report), Views.replicas(overview.replicas)].filter(Boolean));
const loss = slot();
if (report.verdict) main.append(Views.chain(report, overview.path));
if (series) Charts.lines(part("The culprit's reading over the batches"))(series);
if (report.verdict) main.append(Views.lastFrames(report, overview.path));
if (overview.grid.cells.some((row) => row.length)) Charts.folded(slot(), "rank", false)(overview.grid, Views.marks(overview.order));
if (modules) Charts.folded(slot(), "module", false)(modules);
const others = slot();
others.className = "pair";
Charts.ofRun(loss, others)(curves, overview.grid);
main.append(Views.gaps(report) || "", Views.notices(report) || "", h("h2", null, "Ranks"), Views.ranks(null, report, { ...overview, standings: [] }));

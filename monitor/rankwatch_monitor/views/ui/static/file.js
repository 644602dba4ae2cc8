// A run in one file, to attach to a ticket: the file contains all of its data.
"use strict";

const { h } = Views;
const { overview, modules, series, curves } = JSON.parse(document.getElementById("data").textContent);
const { report } = overview;
const main = document.getElementById("main");
const part = (title) => { const section = h("section", null, h("h2", null, title)); main.append(section); return section; };

main.append(
  h("h1", null, report.run.id),
  h("p", null, Views.badge({ is_over: overview.is_over, outcome: report.outcome, judged: Views.doubts(report) }), ` ${Views.judgement(report)}`),
  Views.tiles([["ranks", report.run.world_size], ["batches", report.batches], ["began", Views.clock(overview.began)], ...(overview.ended > overview.began ? [["took", Views.length(overview.ended - overview.began)]] : [])]),
  Views.stall(report) || "",
  Views.collectives(report) || "",
  Views.verdict(report) || "",
  Views.skipped(report) || "",
  Views.replicas(overview.replicas) || "");
if (series) Charts.lines(part("The culprit's reading over the batches"))(series);
if (report.verdict) part("The last frames").append(h("p", { class: "faint" }, "Read from the bottom up. The marked frames lead to the culprit: the output of each is an input of the next."), Views.frames(report, overview.path));
if (overview.grid.cells.some((row) => row.length)) Charts.heatmap(part(Charts.title(overview.grid, "rank")), "rank")(overview.grid, Views.marks(overview.order));
if (modules) Charts.heatmap(part(`${Charts.title(modules, "module")}, over all ranks`), "module")(modules);
for (const [name, title] of Object.entries(Charts.CURVES)) if (curves[name].length) Charts.curves(part(title), title, Charts.HOW[name], name !== "loss")(curves[name], name === "loss" ? curves.skipped : []);
main.append(Views.gaps(report) || "", Views.notices(report) || "", h("h2", null, "Ranks"), Views.ranks(null, report, { ...overview, standings: [] }));

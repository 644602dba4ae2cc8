// Charts drawn by echarts: headroom by row and batch, and readings over batches. All work with a keyboard and a screen reader.
"use strict";

const Charts = (() => {
  const FAR = 24; // doublings; all that is farther away has the same shade

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function number(value, state) {
    if (value === null || value === undefined) return state || "-";
    if (value === 0) return "0.00e+00";
    return value.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2");
  }

  const MOST = 10; // doublings above what is usual; all that is more has the same shade

  // Headroom comes as a number of doublings, and is shown as the factor by which a reading could grow.
  function times(headroom, measure) {
    if (headroom === null) return "nothing read";
    if (headroom < 0) return "inf or nan";
    if (measure === "change") return headroom > 0 ? `+${headroom.toFixed(1)} doublings above its recent median` : "no more than usual";
    return headroom < 20 ? `x${Number((2 ** headroom).toPrecision(3))} below overflow` : `2^${Math.round(headroom)} below overflow`;
  }

  // The title of a heatmap by ``what``, and what its cells say.
  const title = (grid, what) => `${grid.measure === "change" ? "Change" : "Headroom"} by ${what} and batch`;
  const legend = (grid, what) => (grid.measure === "change"
    ? `A cell shows, by the scale on top, how many doublings the largest reading of the ${what} is above the median of its batches before. In bfloat16 and float32, which end at 1e38, this says more than how near it is to overflow.`
    : `A cell shows, by the scale on top, how many times larger the reading of the ${what} could be that is nearest to its dtype's largest number. Look for rows that go towards "next to it".`);
  const USE = "Point at a cell, or move with the arrow keys, to read it.";

  // The end of a long name says more than its beginning.
  const tail = (name, most) => (name.length > most ? `…${name.slice(-Math.floor(most))}` : name);

  function rowOf(grid, rank) {
    return grid.rows.findIndex((name) => { const [first, last] = name.split("-").map(Number); return rank >= first && rank <= (last === undefined ? first : last); });
  }

  function batches(grid, column) {
    const first = grid.first + column * grid.step;
    return grid.step === 1 ? `batch ${first}` : `batches ${first} to ${first + grid.step - 1}`;
  }

  // A canvas; ``options`` draws it again when the data, the size or the colour scheme changes.
  function chart(box, options) {
    const made = echarts.init(box, null, { renderer: "canvas" });
    const draw = () => made.setOption({ animation: false, backgroundColor: "transparent", ...options() }, { notMerge: true });
    new ResizeObserver(() => { made.resize(); draw(); }).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    draw();
    return { made, draw };
  }

  const text = () => ({ color: colour("--faint"), fontFamily: "system-ui, sans-serif" });
  const tooltip = (more) => ({
    renderMode: "richText", confine: true, backgroundColor: colour("--panel"), borderColor: colour("--line"),
    textStyle: { ...text(), color: colour("--ink"), fontSize: 12 }, ...more,
  });
  const axis = (name, more) => ({
    name, nameTextStyle: text(), axisLabel: { ...text(), ...(more && more.axisLabel) }, axisLine: { lineStyle: { color: colour("--line") } },
    axisTick: { show: false }, splitLine: { show: false }, ...more, ...(more && more.axisLabel ? { axisLabel: { ...text(), ...more.axisLabel } } : {}),
  });

  // ``what`` is the kind of a row ("rank", "module"); a click or Enter on a cell calls ``select(row, column)``.
  function heatmap(parent, what, select) {
    const box = Views.h("div", { class: "chart", tabindex: "0", role: "img" });
    const note = Views.h("p", { class: "note", "aria-live": "polite" });
    const how = Views.h("p", { class: "faint how" });
    parent.append(how, box, note);
    let grid = { first: 0, step: 1, rows: [], cells: [] };
    let cells = [];
    let marked = new Map(); // by row, what it is marked for
    let at = null;
    const say = (row, column) => `${what} ${grid.rows[row]}, ${batches(grid, column)}: ${times(grid.cells[row][column], grid.measure)}`;

    const { made, draw } = chart(box, () => {
      const narrow = box.clientWidth < 600;
      const isChange = grid.measure === "change";
      const colours = [colour("--near"), colour("--middle"), colour("--far")];
      const names = Math.min(Math.max(...grid.rows.map((row) => row.length), 3) * 6.6 + 16, narrow ? 90 : 330);
      const every = Math.ceil(grid.rows.length / (box.clientHeight / 16));
      const columns = Math.max(0, ...grid.cells.map((row) => row.length));
      const good = cells.filter((cell) => cell[2] >= 0);
      const bad = cells.filter((cell) => cell[2] < 0);
      return {
        textStyle: text(),
        grid: { left: names, right: 14, top: 68, bottom: 42 },
        tooltip: tooltip({ formatter: ({ value }) => say(value[1], value[0]) }),
        xAxis: axis("batch", {
          type: "category", nameLocation: "middle", nameGap: 26,
          data: Array.from({ length: columns }, (_, column) => grid.first + column * grid.step),
        }),
        yAxis: axis("", {
          type: "category", inverse: true, data: narrow && grid.keys && grid.keys.length ? grid.keys.map((key) => Views.module(key[0])) : grid.rows,
          axisLabel: {
            formatter: (name, index) => (marked.has(index) ? `{marked|▸ ${tail(name, names / 6.6 - 3)}}` : tail(name, names / 6.6 - 2)),
            rich: { marked: { color: colour("--bad"), fontWeight: 700 } },
            interval: (index) => marked.has(index) || (index % every === 0 && ![...marked.keys()].some((other) => Math.abs(other - index) < every)),
          },
        }),
        visualMap: [
          {
            type: "continuous", seriesIndex: 0, min: 0, max: isChange ? MOST : FAR, dimension: 2, orient: "horizontal", left: "center", top: 6, calculable: false,
            itemWidth: 12, itemHeight: narrow ? 110 : 220, text: isChange ? [`+${MOST} doublings`, "as usual"] : ["far from overflow", "next to it"], textStyle: text(),
            inRange: { color: isChange ? colours.reverse() : colours }, hoverLink: false,
          },
          {
            type: "piecewise", seriesIndex: 1, dimension: 2, show: bad.length > 0, left: "center", top: 36, itemSymbol: "rect", textStyle: text(),
            pieces: [{ lte: -1, color: colour("--bad"), label: "inf or nan" }], hoverLink: false, selectedMode: false,
          },
        ],
        series: [good, bad].map((data) => ({
          type: "heatmap", data, progressive: 0, emphasis: { itemStyle: { borderColor: colour("--ink"), borderWidth: 2 } },
        })),
      };
    });
    made.on("click", ({ value }) => select && select(value[1], value[0], grid));

    function point(row, column) {
      at = [Math.min(Math.max(row, 0), grid.rows.length - 1), Math.min(Math.max(column, 0), grid.cells[0].length - 1)];
      const index = (bad) => cells.filter((cell) => cell[2] < 0 === bad).findIndex((cell) => cell[1] === at[0] && cell[0] === at[1]);
      const value = grid.cells[at[0]][at[1]];
      if (value !== null && value !== undefined) {
        const where = { seriesIndex: value < 0 ? 1 : 0, dataIndex: index(value < 0) };
        made.dispatchAction({ type: "downplay" });
        made.dispatchAction({ type: "highlight", ...where });
        made.dispatchAction({ type: "showTip", ...where });
      }
      note.textContent = say(...at);
    }
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] };
    box.addEventListener("keydown", (event) => {
      if (!grid.rows.length || !grid.cells[0].length) return;
      if (event.key === "Enter" && at && select) select(...at, grid);
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      point(...(at ? [at[0] + move[0], at[1] + move[1]] : [0, grid.cells[0].length - 1]));
    });

    // ``marks``: what ranks are marked for, of [rank, text].
    return (fresh, marks) => {
      grid = fresh;
      marked = new Map((marks || []).map(([rank, text]) => [rowOf(grid, rank), `${what} ${rank} (${text})`]).filter(([row]) => row >= 0));
      how.textContent = [legend(grid, what), USE, select ? "A click, or Enter, opens it." : "", marked.size ? `▸ marks ${[...marked.values()].join(", ")}.` : ""].filter(Boolean).join(" ");
      cells = grid.cells.flatMap((row, y) => row.flatMap((value, x) => (value === null ? [] : [[x, y, value]])));
      const badness = (value) => (grid.measure === "change" && value >= 0 ? -value : value < 0 ? -Infinity : value);
      const worst = cells.reduce((least, cell) => (least === null || badness(cell[2]) < badness(least[2]) ? cell : least), null);
      box.setAttribute("aria-label", `${title(grid, what)}. ${worst ? `Worst: ${say(worst[1], worst[0])}.` : "No data yet."} Arrow keys move from cell to cell${select ? ", Enter opens one" : ""}.`);
      box.style.height = `${Math.min(Math.max(150 + 14 * grid.rows.length, 260), 720)}px`;
      made.resize();
      draw();
    };
  }

  const CURVES = { loss: "Loss by rank", norm: "Norm of the gradients by rank", rate: "Batches a second", gradient: "Largest gradient", memory: "Device memory by rank, GiB" };
  const HOW = {
    loss: "What the training hands to backward(). Losses that take turns, such as a GAN's two, have lines of their own, each with the class that it trains. It should fall and level out; a jump or a diamond (inf or nan) is where to look. A rank far above the others has other data, or another model.",
    rate: "It should be level. A dip is a pause, such as an evaluation or a checkpoint; a lasting drop is a slow rank, host or disk.",
    norm: "The norm of all gradients in the optimizer step before each batch, as they came: before clip_grad_norm_. A slow rise, or ever higher peaks, comes before a divergence; a single peak is a bad batch; near zero, nothing learns. Under DDP all ranks have the same one. Where ranks hold shards and no clip_grad_norm_ runs, it is that of each rank's shards.",
    memory: "What tensors take on each rank's GPU, as the forward ends: near the peak of a step. It should be level; a steady rise is a leak, such as losses that are kept with their graphs; a rank far above the others has longer inputs, or more of the model.",
    gradient: "The largest single gradient of a batch, over all ranks; of a long run, of some batches. A slow rise over many batches comes before an overflow; a jump is a bad batch; zero means that nothing learns.",
  };
  const HOW_LINES = "Each line is the reading's largest number (abs max) by batch, on a logarithmic scale; dashed: its smallest (abs min); a diamond: inf or nan. A healthy reading stays in its range; look for the batch in which it leaves it. Ctrl and the wheel zoom; the arrow keys read point by point.";

  // A number of the whole run over the batches: a line for each of [batch, number or null, rank or null]; null: inf or nan.
  // ``isFromZero``: a small change is to look small.
  function curves(parent, what, how, isFromZero) {
    const box = Views.h("div", { class: "chart small", tabindex: "0", role: "img" });
    const note = Views.h("p", { class: "note", "aria-live": "polite" });
    parent.append(Views.h("p", { class: "faint how" }, how), box, note);
    let drawn = [];
    let marked = []; // [batch, what was left out there]
    let at = null;
    const short = (value) => (Math.abs(value) >= 0.001 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(4))) : value === 0 ? "0" : number(value));
    const said = (line, point) => `${line.name}: ${point[1] === null ? "inf or nan" : short(point[1])}${point[2] === null || point[2] === line.rank ? "" : ` (rank ${point[2]})`}`;

    const { made, draw } = chart(box, () => {
      const colours = colour("--series").split(" ");
      const numbers = drawn.flatMap((line) => line.points.map((point) => point[1]).filter((value) => value !== null));
      const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
      const isLog = numbers.length > 0 && least > 0 && most > 30 * least;
      const series = drawn.flatMap((line, index) => {
        const bad = line.points.filter((point) => point[1] === null);
        const shared = { color: colours[index % colours.length], name: line.name };
        return [
          { ...shared, type: "line", showSymbol: line.points.length < 60, symbolSize: 4, lineStyle: { width: line.thin ? 1 : 2, type: line.thin ? "dashed" : "solid" }, data: line.points.map((point) => ({ value: [point[0], point[1]], point, line })) },
          ...(bad.length ? [{ type: "scatter", name: `${line.name}, inf or nan`, color: colour("--bad"), symbol: "diamond", symbolSize: 12, data: bad.map((point) => ({ value: [point[0], numbers.length ? most : 1], point, line })) }] : []),
        ];
      });
      if (series.length && marked.length) {
        series[0].markLine = {
          symbol: "none", animation: false, lineStyle: { color: colour("--bad"), type: "dotted" }, data: marked.map(([batch]) => ({ xAxis: batch })),
          label: { formatter: "left out", position: "insideEndTop", color: colour("--bad") },
        };
      }
      return {
        textStyle: text(),
        grid: { left: 58, right: 16, top: 44, bottom: 42 },
        legend: { type: "scroll", top: 6, textStyle: text(), pageTextStyle: text(), inactiveColor: colour("--line") },
        tooltip: tooltip({ trigger: "axis", formatter: (points) => [`batch ${points[0].value[0]}`, ...new Set(points.map(({ data }) => said(data.line, data.point)))].join("\n") }),
        xAxis: axis("batch", { type: "value", scale: true, nameLocation: "middle", nameGap: 26, minInterval: 1 }),
        yAxis: axis("", { type: isLog ? "log" : "value", scale: !isLog && !isFromZero, axisLabel: { formatter: short }, splitLine: { show: true, lineStyle: { color: colour("--line") } } }),
        dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl" }],
        series,
      };
    });
    box.addEventListener("keydown", (event) => {
      const line = drawn[0];
      if (!line || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      event.preventDefault();
      at = Math.min(Math.max((at === null ? line.points.length : at) + (event.key === "ArrowLeft" ? -1 : 1), 0), line.points.length - 1);
      const [batch] = line.points[at];
      note.textContent = `batch ${batch}: ${drawn.flatMap((each) => each.points.filter((point) => point[0] === batch).map((point) => said(each, point))).join(", ")}`;
      made.dispatchAction({ type: "showTip", seriesIndex: 0, dataIndex: at });
    });

    return (fresh, steps) => {
      drawn = fresh;
      marked = steps || [];
      const last = drawn.map((line) => said(line, line.points.at(-1)));
      box.setAttribute("aria-label", drawn.length ? `${what}. At the end: ${last.join(", ")}.${marked.length ? ` Left out: ${marked.map(([, what]) => what).join(", ")}.` : ""} Arrow keys read the points one by one.` : `${what}: no data yet.`);
      draw();
    };
  }

  // One reading over the batches: abs max as a line, abs min as a dashed line, inf and nan as diamonds at the top.
  function lines(parent) {
    const box = Views.h("div", { class: "chart", tabindex: "0", role: "img" });
    const note = Views.h("p", { class: "note", "aria-live": "polite" });
    parent.append(Views.h("p", { class: "faint how" }, HOW_LINES), box, note);
    let data = { limit: null, dtype: "", lines: [] };
    let at = null;
    const name = (line) => line.name || (line.rank === null ? "all ranks" : `rank ${line.rank}`);
    const positive = (value) => (value > 0 ? value : null); // the axis is logarithmic

    const { made, draw } = chart(box, () => {
      const colours = colour("--series").split(" ");
      const highest = Math.max(...data.lines.flatMap((line) => line.points.map((point) => point[2] || 0)), 1e-30);
      const series = data.lines.flatMap((line, index) => {
        const shared = { color: colours[index % colours.length], symbolSize: 5, showSymbol: line.points.length < 60 };
        const bad = line.points.filter((point) => point[3] === "inf" || point[3] === "nan");
        return [
          { ...shared, type: "line", name: `${name(line)}, abs max`, data: line.points.map((point) => [point[0], positive(point[2])]) },
          { ...shared, type: "line", name: `${name(line)}, abs min`, lineStyle: { type: "dashed", width: 1 }, data: line.points.map((point) => [point[0], positive(point[1])]) },
          ...(bad.length ? [{
            type: "scatter", name: `${name(line)}, inf or nan`, color: colour("--bad"), symbol: "diamond", symbolSize: 13,
            data: bad.map((point) => ({ value: [point[0], data.limit || highest], state: point[3] })),
          }] : []),
        ];
      });
      if (series.length && data.limit && data.limit < highest * 1e6) {
        series[0].markLine = {
          silent: true, symbol: "none", data: [{ yAxis: data.limit }], lineStyle: { color: colour("--bad") },
          label: { formatter: `${data.dtype}'s largest number`, position: "insideStartTop", color: colour("--bad") },
        };
      }
      return {
        textStyle: text(),
        grid: { left: 66, right: 18, top: 48, bottom: 42 },
        legend: { type: "scroll", top: 8, textStyle: text(), pageTextStyle: text(), inactiveColor: colour("--line") },
        tooltip: tooltip({
          trigger: "axis",
          formatter: (points) => [`batch ${points[0].value[0]}`, ...points.map((point) => `${point.seriesName}: ${point.data.state || number(point.value[1])}`)].join("\n"),
        }),
        xAxis: axis("batch", { type: "value", scale: true, nameLocation: "middle", nameGap: 26, minInterval: 1 }),
        yAxis: axis("", { type: "log", axisLabel: { formatter: (value) => number(value).replace(".00", "") }, splitLine: { show: true, lineStyle: { color: colour("--line") } } }),
        dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl" }],
        series,
      };
    });
    box.addEventListener("keydown", (event) => {
      const line = data.lines[0];
      if (!line || !line.points.length || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      event.preventDefault();
      at = Math.min(Math.max((at === null ? line.points.length : at) + (event.key === "ArrowLeft" ? -1 : 1), 0), line.points.length - 1);
      const [batch, low, high, state] = line.points[at];
      note.textContent = `${name(line)}, batch ${batch}: abs min ${number(low, state)}, abs max ${number(high, state)}`;
      made.dispatchAction({ type: "showTip", seriesIndex: 0, dataIndex: at });
    });

    return (fresh) => {
      data = fresh;
      const count = data.lines.reduce((sum, line) => sum + line.points.length, 0);
      box.setAttribute("aria-label", `${data.lines.map(name).join(", ")}: ${count} points. Arrow keys read them one by one.`);
      draw();
    };
  }

  return { heatmap, lines, curves, CURVES, HOW, number, times, batches, title, legend };
})();
